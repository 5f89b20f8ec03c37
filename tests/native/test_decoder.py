import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import DecoderLimits
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import inverse_frequencies
from penstock.engine.native.decoder import NativeAttention, NativeDecoder, unsupported
from penstock.engine.native.library import STEP_PARTS, Type
from penstock.models.names import CheckpointNames, decoder_weights
from penstock.models.spec import AttentionSpec, DecoderSpec, MoeSpec, RopeSpec

LIMITS = DecoderLimits(step_tokens=256, max_samples=16, max_model_len=256)


def spec(**changes):
    base = {
        "architecture": "LlamaForCausalLM", "vocab_size": 301, "hidden_size": 80, "intermediate_size": 150,
        "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "max_position": 256,
        "norm_eps": 1e-6, "rope": RopeSpec(theta=1000.0),
    }  # fmt: skip
    return DecoderSpec(**base | changes)


GEMMA = {
    "activation": "gelu_tanh", "norm_offset": 1.0, "sublayer_norms": True, "embedding_scale": 80**0.5,
}  # fmt: skip
MIXTURES = {
    "mixtral": spec(
        moe=MoeSpec(num_experts=5, top_k=2, normalise=True), attention=AttentionSpec(windows=(40,) * 3)
    ),
    "qwen3_moe": spec(
        moe=MoeSpec(num_experts=17, top_k=6, normalise=False), qk_norm=True, head_dim=64, intermediate_size=48
    ),
    "gated by GELU, normed after": spec(
        moe=MoeSpec(num_experts=3, top_k=3, normalise=True), **GEMMA, intermediate_size=48, tied_head=True
    ),
}
SPECS = {
    "llama": spec(),
    "qwen2": spec(qkv_bias=True, num_heads=4, num_kv_heads=4, head_dim=16),
    "qwen3": spec(qk_norm=True, tied_head=True, head_dim=64, num_heads=7, num_kv_heads=1),
    "biases": spec(o_bias=True, mlp_bias=True, qkv_bias=True, tied_head=True),
    "gemma2": spec(
        **GEMMA,
        attention=AttentionSpec(scale=0.2, softcap=3.0, windows=(50, 0, 50)),
        logit_softcap=7.0,
        tied_head=True,
    ),
    "gemma3": spec(
        **GEMMA,
        attention=AttentionSpec(windows=(0, 33, 33)),
        local_rope=RopeSpec(theta=50.0, partial=0.5),
        qk_norm=True,
    ),
}


def random_weights(of, dtype, seed=3):
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for weight in decoder_weights(of, CheckpointNames()):
        shape = weight.shape
        scale = (0.3 if of.norm_offset else 1.0) if len(shape) == 1 else shape[-1] ** -0.5
        tensors[weight.key] = (torch.randn(shape, generator=rng) * scale).to(dtype)
    return Given(tensors)


class Given:
    """Weights that are in memory."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    def take(self, key):
        return self.tensors.pop(key)

    take_linear = take

    def take_parts(self, key):
        return (self.take(key),)


def batch(computed, counts, tables):
    positions = torch.cat([torch.arange(at, at + count) for at, count in zip(computed, counts, strict=True)])
    return AttentionBatch(
        num_computed=np.array(computed, np.int32),
        num_tokens=np.array(counts, np.int32),
        positions=positions,
        block_tables=tables,
    )


class Model:
    """A native decoder with a cache of its own; rows have fixed, scattered blocks."""

    def __init__(self, of, dtype, kernels, precision="native", model_queues=6, weights=None):
        self.cache = KVCache(of, model_queues * 16, dtype, torch.device("cpu"))
        self.model_queues = model_queues
        self.decoder = NativeDecoder(
            of, weights or random_weights(of, dtype), kernels, LIMITS, self.cache, precision
        )
        self.attention = NativeAttention()

    @torch.inference_mode()
    def step(self, chunks):
        """Logits of the last token of every chunk, a list of (lane, first position, token ids)."""
        counts = [len(ids) for _, _, ids in chunks]
        tables = np.array(
            [np.arange(16) * self.model_queues + model_queue for model_queue, _, _ in chunks], np.int32
        )
        self.attention.begin(batch([at for _, at, _ in chunks], counts, tables))
        tokens = torch.cat([torch.tensor(ids) for _, _, ids in chunks])
        samples = torch.tensor(counts).cumsum(0) - 1
        return self.decoder.forward(tokens, samples, self.attention).clone()


class Exact:
    """The same decoder in float64 on one whole sequence, written down as in the papers."""

    def __init__(self, of, dtype):
        self.of = of
        weights, self.dtype = random_weights(of, dtype), dtype
        self.w = {key: weights.take(key).double() for key in list(weights.tensors)}

    def norm(self, x, key):
        weight = self.w[key] + self.of.norm_offset
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.of.norm_eps) * weight

    def linear(self, x, key):
        return F.linear(x, self.w[key], self.w.get(f"{key}_bias"))

    def rotate(self, x, rope):
        angles = torch.outer(
            torch.arange(len(x)).double(), inverse_frequencies(rope, self.of.head_dim).double()
        )
        cos, sin, turning = angles.cos()[:, None], angles.sin()[:, None], rope.rotary_dim(self.of.head_dim)
        a, b = x[..., :turning].chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., turning:]), dim=-1)

    def attend(self, q, k, v, i):
        """Causal attention of [heads, tokens, head_dim], with the layer's window and cap."""
        how, at = self.of.attention, torch.arange(q.shape[1])
        scores = q @ k.transpose(1, 2) * (how.scale or self.of.head_dim**-0.5)
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        behind = at[:, None] - at
        seen = (behind >= 0) & (behind < (how.window(i) or len(at)))
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)

    def gated(self, x, gate_up):
        gate, up = gate_up(x).chunk(2, dim=-1)
        return (F.silu(gate) if self.of.activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def mlp(self, x, i):
        moe = self.of.moe
        if moe is None:
            return self.linear(self.gated(x, lambda x: self.linear(x, f"{i}.gate_up")), f"{i}.down")
        shares, chosen = self.linear(x, f"{i}.router").softmax(-1).sort(descending=True, stable=True)
        shares[:, moe.top_k :] = 0
        if moe.normalise:
            shares /= shares.sum(-1, keepdim=True)
        shares = shares.gather(1, chosen.argsort())  # By expert.
        experts = zip(
            *(self.w[f"{i}.{key}"].chunk(moe.num_experts) for key in ("gate_up", "down")), strict=True
        )
        return sum(
            shares[:, e, None] * F.linear(self.gated(x, lambda x, w=into: F.linear(x, w)), back)
            for e, (into, back) in enumerate(experts)
        )

    def logits(self, ids):
        of, embedding = self.of, self.w["embedding"]
        x = embedding[ids] * float(torch.tensor(of.embedding_scale, dtype=self.dtype))
        heads = [of.num_heads, of.num_kv_heads, of.num_kv_heads]
        for i in range(of.num_layers):
            qkv = self.linear(self.norm(x, f"{i}.input_norm"), f"{i}.qkv").view(len(ids), -1, of.head_dim)
            q, k, v = qkv.split(heads, dim=1)
            if of.qk_norm:
                q, k = self.norm(q, f"{i}.q_norm"), self.norm(k, f"{i}.k_norm")
            rope = of.layer_rope(i)
            q, k, v = (t.transpose(0, 1) for t in (self.rotate(q, rope), self.rotate(k, rope), v))
            k, v = (t.repeat_interleave(of.group_size, 0) for t in (k, v))
            x = x + self.given(self.linear(self.attend(q, k, v, i), f"{i}.o"), f"{i}.attention_out_norm")
            x = x + self.given(self.mlp(self.norm(x, f"{i}.post_attention_norm"), i), f"{i}.mlp_out_norm")
        logits = F.linear(self.norm(x, "final_norm"), embedding if of.tied_head else self.w["head"])
        return of.logit_softcap * torch.tanh(logits / of.logit_softcap) if of.logit_softcap else logits

    def given(self, x, key):
        """What a sublayer adds to the residual."""
        return self.norm(x, key) if self.of.sublayer_norms else x


def prompt(rng, length, vocab=301):
    return torch.randint(0, vocab, (length,), generator=rng).tolist()


def worst(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_equals_the_exact_decoder(kernels, rng, family, dtype, bound):
    model, exact = Model(SPECS[family], dtype, kernels), Exact(SPECS[family], dtype)
    known = {model_queue: [] for model_queue in range(3)}
    for chunks in (
        [(0, 0, prompt(rng, 37)), (1, 0, prompt(rng, 100))],
        [(0, 37, prompt(rng, 1)), (2, 0, prompt(rng, 5)), (1, 100, prompt(rng, 64))],
        [(0, 38, prompt(rng, 1)), (1, 164, prompt(rng, 1)), (2, 5, prompt(rng, 1))],
    ):
        got = model.step(chunks)
        for i, (model_queue, _, ids) in enumerate(chunks):
            known[model_queue] += ids
            assert worst(got[i], exact.logits(known[model_queue])[-1]) < bound


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_equal_the_exact_decoder(kernels, rng, family):
    """Not in bfloat16: where two experts are nearly as probable, rounding chooses."""
    of = MIXTURES[family]
    model, exact = Model(of, torch.float32, kernels), Exact(of, torch.float32)
    ids = [prompt(rng, 70), prompt(rng, 21)]
    model.step([(0, 0, ids[0][:40]), (1, 0, ids[1][:20])])
    got = model.step([(1, 20, ids[1][20:]), (0, 40, ids[0][40:])])
    for i, model_queue in enumerate((1, 0)):
        assert worst(got[i], exact.logits(ids[model_queue])[-1]) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equally_probable_experts_the_first_compute(kernels, rng, dtype):
    of = spec(moe=MoeSpec(num_experts=6, top_k=2, normalise=True), num_layers=1)

    def logits(sound):
        """All experts equally probable, all but two broken."""
        tensors = random_weights(of, dtype).tensors
        tensors["0.router"].zero_()
        tensors["0.gate_up"].view(6, -1, 80)[[e for e in range(6) if e not in sound]] = torch.nan
        return Model(of, dtype, kernels, weights=Given(tensors)).step([(0, 0, [3, 5, 9])])

    assert logits((0, 1)).isfinite().all()
    assert logits((0, 2)).isnan().any()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", *MIXTURES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_same_bits_however_the_work_is_cut(kernels, rng, family, dtype):
    of = (SPECS | MIXTURES)[family]
    for precision in ("native", "int8", "int4"):
        if unsupported(of, dtype, kernels, precision):
            continue
        ids, others = prompt(rng, 90), prompt(rng, 70)
        kernels.set_threads(1)
        whole = Model(of, dtype, kernels, precision).step([(0, 0, ids)])
        for threads, chunk in ((1, 7), (2, 1), (2, 16), (3, 48)):
            kernels.set_threads(threads)
            model = Model(of, dtype, kernels, precision)
            for at in range(0, 90, chunk):
                beside = [(1, at // 2, others[at // 2 : at // 2 + 3]), (2, at, ids[at : at + 1])]
                got = model.step([*beside, (0, at, ids[at : at + chunk])])[-1:]
            assert torch.equal(got, whole), f"{threads} threads, chunks of {chunk}"


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.12), ("int4", 0.6)])
def test_rounded_weights_stay_close(kernels, rng, precision, bound):
    if unsupported(SPECS["llama"], torch.bfloat16, kernels, precision):
        pytest.skip(f"{kernels.isa} has no int8 dot products")
    ids = prompt(rng, 60)
    for family in SPECS.values():
        exact = Exact(family, torch.bfloat16).logits(ids)[-1]
        rounded = Model(family, torch.bfloat16, kernels, precision).step([(0, 0, ids)])[0]
        assert (rounded - exact).norm() / exact.norm() < bound


def test_a_step_tells_what_its_parts_took(kernels, rng):
    timed, plain = (Model(SPECS["llama"], torch.float32, kernels) for _ in range(2))
    timed.decoder.part_ns = np.zeros(len(STEP_PARTS), np.int64)
    chunks = [(0, 0, prompt(rng, 40)), (1, 0, prompt(rng, 7))]
    assert torch.equal(timed.step(chunks), plain.step(chunks))
    assert (timed.decoder.part_ns > 0).all()
    before = timed.decoder.part_ns.copy()
    timed.step([(0, 40, [5])])
    assert (timed.decoder.part_ns > before).all()  # They add up.


def test_a_rehearsal_computes_less_and_leaves_no_trace(kernels, rng):
    rehearsed, plain = (Model(SPECS["qwen3"], torch.float32, kernels) for _ in range(2))
    chunks = [(0, 0, prompt(rng, 30))]
    with rehearsed.decoder.rehearsing():
        nonsense = rehearsed.step(chunks)
    want = plain.step(chunks)
    assert not torch.equal(nonsense, want)
    assert torch.equal(rehearsed.step(chunks), want)


def test_no_samples(kernels, rng):
    model = Model(SPECS["llama"], torch.float32, kernels)
    rows = [(0, 0, prompt(rng, 4))]
    want = model.step(rows)
    model.attention.begin(batch([4], [1], np.arange(16, dtype=np.int32)[None] * 6))
    none = model.decoder.forward(torch.tensor([1]), torch.zeros(0, dtype=torch.int64), model.attention)
    assert none.shape == (0, 301)
    assert torch.equal(model.step(rows), want)


@pytest.mark.parametrize(
    "bad",
    ["token above the vocabulary", "negative token", "block beyond the cache", "context beyond the table"],
)
def test_tables_that_point_outside_are_refused(kernels, bad):
    model = Model(SPECS["llama"], torch.float32, kernels)
    token = {"token above the vocabulary": 301, "negative token": -1}.get(bad, 0)
    blocks = np.full((1, 2), 97 if bad == "block beyond the cache" else 0, np.int32)
    computed = 32 if bad == "context beyond the table" else 0
    model.attention.begin(batch([computed], [1], blocks))
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="point outside"):
        model.decoder.forward(one + token, one, model.attention)


def test_what_is_unsupported_is_said(kernels):
    assert unsupported(SPECS["llama"], torch.bfloat16, kernels, "native") is None
    assert "head size" in unsupported(spec(head_dim=24), torch.bfloat16, kernels, "native")
    assert "float16" in unsupported(spec(), torch.float16, kernels, "native")
    assert unsupported(spec(), torch.float32, kernels, "int4") is None
    if not kernels.supports(Type.I8):
        assert "int8" in unsupported(spec(), torch.bfloat16, kernels, "int8")
