// A real OpenID Connect provider on a free port, whose signing keys can be rotated while it runs.
// Prints its port. POST /test/rotate[?drop] puts a new key in front of the old ones, or in their place.
import { generateKeyPairSync } from 'node:crypto';
import { createServer } from 'node:http';
import { Provider } from 'oidc-provider';

const AUDIENCE = 'urn:penstock';
const keys = [];
let current;

function newKey(algorithm) {
  const pair = algorithm === 'ES256'
    ? generateKeyPairSync('ec', { namedCurve: 'P-256' })
    : generateKeyPairSync('rsa', { modulusLength: 2048 });
  return { ...pair.privateKey.export({ format: 'jwk' }), alg: algorithm, use: 'sig', kid: `key-${Date.now()}-${keys.length}` };
}

function start(issuer, algorithm) {
  const provider = new Provider(issuer, {
    jwks: { keys },
    clients: ['acme', 'umbrella'].map((id) => ({
      client_id: id, client_secret: 'a secret of the test', grant_types: ['client_credentials'],
      redirect_uris: [], response_types: [], id_token_signed_response_alg: algorithm,
    })),
    features: {
      devInteractions: { enabled: false },
      clientCredentials: { enabled: true },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: () => ({
          scope: 'generate', audience: AUDIENCE, accessTokenTTL: 600, accessTokenFormat: 'jwt',
          jwt: { sign: { alg: algorithm } },
        }),
      },
    },
    extraTokenClaims: (_context, token) => ({ plan: { tier: token.clientId === 'acme' ? 'pro' : 'free' } }),
  });
  current = provider.callback();
}

const server = createServer((request, response) => {
  const url = new URL(request.url, 'http://localhost');
  if (url.pathname !== '/test/rotate') return current(request, response);
  if (url.searchParams.has('drop')) keys.length = 0;
  const algorithm = url.searchParams.get('alg') ?? 'RS256';
  keys.unshift(newKey(algorithm));
  start(issuer(), algorithm);
  return response.end();
});
const issuer = () => `http://127.0.0.1:${server.address().port}`;
server.listen(0, '127.0.0.1', () => {
  keys.push(newKey('RS256'));
  start(issuer(), 'RS256');
  console.log(server.address().port);
});
