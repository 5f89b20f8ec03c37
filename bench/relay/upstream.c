/* An OpenAI endpoint that costs next to nothing: for proxies to relay. One thread, epoll.

   upstream PORT CHUNKS PERIOD_US     a POST whose body has "stream": true gets as many events as its "max_tokens" says (CHUNKS if it
   does not), each sent by itself, one per PERIOD_US or (0) as fast as they are taken. If it has "return_token_ids": true they are
   those of vLLM: a token id in each, the prompt's in the first, the request's id in all, and (for "include_usage": true) the usage
   behind the last. Other POSTs get one JSON body; GETs get a list of the one model "m". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define REQUEST_MAX 65536

typedef struct Client {
    int fd, len, left, waiting, has_ids, num_events;
    struct Client *next, **at;
    const char *prompt, *id; /* Of the request, as it stands in `data` until the next one comes. */
    int prompt_len, id_len, has_usage;
    char data[REQUEST_MAX + 1];
} Client;

static const char ANSWER[] =
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"message\":{\"role\":\"assistant\",\"content\":\"The pipe brings water to the turbine, and light comes.\"},"
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":12,\"total_tokens\":21}}";
static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,\"owned_by\":\"x\"}]}";
static const char HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
#define EVENT(delta, reason) \
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\"choices\":" \
    "[{\"index\":0,\"delta\":" delta ",\"logprobs\":null,\"finish_reason\":" reason "}]}\n\n"
static const char TOKEN[] = EVENT("{\"content\":\" water\"}", "null");
static const char LAST[] = EVENT("{}", "\"length\"") "data: [DONE]\n\n";
#define IDS_HEAD "data: {\"id\":\"cmpl-%.*s\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":["
#define IDS \
    IDS_HEAD "{\"index\":0,\"text\":\" water\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null," \
    "\"prompt_token_ids\":%.*s,\"token_ids\":[300]}],\"usage\":null}\n\n"
#define USAGE IDS_HEAD "],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n"

static Client *active;
static int num_chunks, poller;

static void detach(Client *c) {
    if (!c->at) return;
    *c->at = c->next;
    if (c->next) c->next->at = c->at;
    c->at = NULL;
}

static void attach(Client *c) {
    c->next = active;
    c->at = &active;
    if (active) active->at = &c->next;
    active = c;
}

static void drop(Client *c) {
    detach(c);
    close(c->fd);
    free(c);
}

/* What vLLM sends next. */
static void id_event(const Client *c, char *out) {
    int is_first = c->left == c->num_events, is_last = c->left == 1;
    int n = sprintf(out, IDS, c->id_len, c->id, is_last ? "\"length\"" : "null", is_first ? c->prompt_len : 4,
                    is_first ? c->prompt : "null");
    if (!is_last) return;
    if (c->has_usage) {
        int num_prompt = 1;
        for (int i = 0; i < c->prompt_len; i++) num_prompt += c->prompt[i] == ',';
        n += sprintf(out + n, USAGE, c->id_len, c->id, num_prompt, num_prompt + c->num_events, c->num_events);
    }
    strcpy(out + n, "data: [DONE]\n\n");
}

/* One more event; 0 when the client is gone or does not read. */
static int step(Client *c) {
    static char event[REQUEST_MAX + 2048], out[REQUEST_MAX + 3072];
    if (c->has_ids) id_event(c, event);
    else strcpy(event, c->left > 1 ? TOKEN : LAST);
    int n = sprintf(out, "%zx\r\n%s\r\n%s", strlen(event), event, c->left > 1 ? "" : "0\r\n\r\n");
    long sent = send(c->fd, out, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EAGAIN) { c->waiting = 1; return 0; }
    if (sent != n) { drop(c); return 0; }
    if (--c->left == 0) detach(c);
    return 1;
}

static void answer(Client *c, int streams, int is_get, int paced) {
    if (streams) {
        send(c->fd, HEAD, sizeof HEAD - 1, MSG_NOSIGNAL);
        c->left = c->num_events = streams;
        c->waiting = 0;
        attach(c);
        while (!paced && c->left > 0 && step(c)) {}
        return;
    }
    const char *body = is_get ? MODELS : ANSWER;
    char out[2048];
    int n = sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    send(c->fd, out, n, MSG_NOSIGNAL);
}

/* The value behind `name` in a body, up to and with `end`, or null. */
static const char *value(const char *body, const char *name, char end, int *len) {
    const char *found = strstr(body, name), *last = found ? strchr(found + strlen(name), end) : NULL;
    *len = last ? last + 1 - found - (int)strlen(name) : 4;
    return last ? found + strlen(name) : "null";
}

static void readable(Client *c, int paced) {
    long n = recv(c->fd, c->data + c->len, REQUEST_MAX - c->len, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) { drop(c); return; }
    c->len += n;
    c->data[c->len] = 0;
    char *end = strstr(c->data, "\r\n\r\n");
    if (!end) return;
    char *length = strcasestr(c->data, "content-length:");
    long body = length && length < end ? atol(length + 15) : 0;
    if (strcasestr(c->data, "transfer-encoding: chunked")) {
        if (memcmp(c->data + c->len - 5, "0\r\n\r\n", 5)) return;
    } else if (c->len < end + 4 - c->data + body) return;
    int streams = strstr(end, "\"stream\":true") || strstr(end, "\"stream\": true") ? num_chunks : 0;
    char *max_tokens = strstr(end, "\"max_tokens\":");
    if (streams && max_tokens && atoi(max_tokens + 13) > 0) streams = atoi(max_tokens + 13);
    c->has_ids = strstr(end, "\"return_token_ids\":true") != NULL;
    if (c->has_ids) {
        c->has_usage = strstr(end, "\"include_usage\":true") != NULL;
        c->prompt = value(end, "\"prompt\":", ']', &c->prompt_len);
        c->id = value(end, "\"request_id\":\"", '"', &c->id_len);
        c->id_len--; /* Its quotation mark. */
    }
    int is_get = !strncmp(c->data, "GET", 3);
    c->len = 0;
    answer(c, streams, is_get, paced);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    num_chunks = atoi(argv[2]);
    long period = atol(argv[3]);
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (void *)&a, sizeof a) || listen(listener, 4096)) { perror("listen"); return 1; }
    poller = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    static Client timer_mark;
    int timer = -1;
    if (period) {
        timer = timerfd_create(CLOCK_MONOTONIC, 0);
        struct itimerspec t = {{period / 1000000, period % 1000000 * 1000}, {period / 1000000, period % 1000000 * 1000}};
        timerfd_settime(timer, 0, &t, NULL);
        e.data.ptr = &timer_mark;
        epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e);
    }
    struct epoll_event events[512];
    for (;;) {
        int n = epoll_wait(poller, events, 512, -1);
        for (int i = 0; i < n; i++) {
            Client *c = events[i].data.ptr;
            if (!c) {
                int fd = accept4(listener, NULL, NULL, 0);
                if (fd < 0) continue;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                c = calloc(1, sizeof(Client));
                c->fd = fd;
                e.events = EPOLLIN | EPOLLOUT | EPOLLET;
                e.data.ptr = c;
                epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
            } else if (c == &timer_mark) {
                unsigned long ticks;
                if (read(timer, &ticks, 8) == 8)
                    for (Client *s = active, *next; s; s = next) { next = s->next; step(s); }
            } else {
                if (events[i].events & EPOLLOUT && c->waiting && c->left > 0 && !period) {
                    c->waiting = 0;
                    int alive = 1;
                    while (c->left > 0 && (alive = step(c))) {}
                    if (!alive && !c->waiting) continue; /* It was dropped. */
                }
                if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c, period > 0);
            }
        }
    }
}
