/* A load client: one thread, epoll, keep-alive connections, one request after another on each.

   load PORT CONNECTIONS REQUESTS FILE [STEPS INTERVAL SECONDS]     sends FILE's bytes as the request; "streamed" answers end with a chunk of
   length 0.
   load PORT CONNECTIONS REQUESTS FILE MEAN_US     an open load: requests are due at random (Poisson, MEAN_US apart in the mean, the same in
   each run), whether or not others have ended; one takes a connection that is free, and its latency counts from when it was due.

   Prints one JSON object: requests, errors, events ("\n\n" seen), seconds, latency and time to first byte (p50, p99, in us), and the
   time between two events of one answer (p50, p99, worst, in us) from when every connection has had its first byte.

   With STEPS (bench/relay/stand_in_worker.py writes it) it knows when each token was sent, by its text: the object also has how long
   tokens took from there to here (p50, p99, worst, in us), and a line with the same for every INTERVAL comes before it. It stops
   SECONDS after all have connected, wherever its answers are. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define HEAD_MAX 8192

typedef struct {
    int fd;
    char head[HEAD_MAX];
    int head_len, in_body, chunked;
    long left;
    char tail[5];
    int was_newline;
    double started, first, last;
} Connection;

#define GAP_US 100
#define NUM_GAPS 600000
static long gaps[NUM_GAPS], num_gaps, num_first;

/* One step of the worker: the two letters that its tokens are, their id, and when it was sent (CLOCK_MONOTONIC). */
typedef struct { char text[4]; unsigned token; volatile double sent_us; } Step;
static Step *steps;
static short step_of[1 << 16];
static long delays[NUM_GAPS], delays_lately[NUM_GAPS], num_delays, num_lately;
static double lately_s, interval_s, limit_s, started_us;

static void map_steps(const char *path) {
    int fd = open(path, O_RDONLY);
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) { perror(path); exit(1); }
    steps = mmap(NULL, info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    memset(step_of, -1, sizeof step_of);
    for (long i = 0; i < info.st_size / (long)sizeof(Step); i++)
        step_of[(unsigned char)steps[i].text[0] << 8 | (unsigned char)steps[i].text[1]] = i;
}

typedef struct { double p50, p99, worst; } Quantiles;

static Quantiles quantiles(const long *counts, long num) {
    Quantiles q = {0, 0, 0};
    for (long i = 0, seen = 0; i < NUM_GAPS; i++) {
        if (!counts[i]) continue;
        if (seen <= num / 2) q.p50 = i * GAP_US;
        if (seen <= num / 100 * 99) q.p99 = i * GAP_US;
        q.worst = i * GAP_US;
        seen += counts[i];
    }
    return q;
}

static void tell_lately(double t) {
    Quantiles q = quantiles(delays_lately, num_lately);
    printf("{\"at_s\":%.0f,\"tokens\":%ld,\"added_p50_us\":%.0f,\"added_p99_us\":%.0f,\"added_worst_us\":%.0f}\n",
           (t - started_us) / 1e6, num_lately, q.p50, q.p99, q.worst);
    fflush(stdout);
    memset(delays_lately, 0, sizeof delays_lately);
    num_lately = 0;
    lately_s = t / 1e6;
}

/* The tokens in some bytes of an answer; one that is cut in two by a read is not timed. */
static void time_tokens(const char *data, long n, double t) {
    static const char KEY[] = "\"content\":\"";
    for (const char *p = data, *end = data + n; (p = memmem(p, end - p, KEY, sizeof KEY - 1));) {
        for (p += sizeof KEY - 1; p + 1 < end && *p != '"'; p += 2) {
            int step = step_of[(unsigned char)p[0] << 8 | (unsigned char)p[1]];
            if (step < 0) break;
            long delay = (t - steps[step].sent_us) / GAP_US;
            if (delay < 0) delay = 0;
            if (delay >= NUM_GAPS) delay = NUM_GAPS - 1;
            delays[delay]++, delays_lately[delay]++, num_delays++, num_lately++;
        }
    }
    if (!lately_s) lately_s = t / 1e6;
    if (t / 1e6 - lately_s >= interval_s) tell_lately(t);
}

static double *totals, *firsts;
static long num_done, num_started, num_requests, num_errors, num_events;
static char *request;
static long request_len;
static int port, poller, all_connections;


static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void begin(Connection *c, double due);

static double mean_us, due_us;
static Connection **idle, timer_mark;
static int num_idle, timer;

static void open_connection(Connection *c) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (void *)&a, sizeof a)) { perror("connect"); exit(1); }
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
}

static void finish(Connection *c, int ok, int reopen) {
    double t = now_us();
    if (!ok) num_errors++;
    totals[num_done] = t - c->started;
    firsts[num_done] = (c->first ? c->first : t) - c->started;
    num_done++;
    if (reopen) { close(c->fd); c->fd = -1; }
    if (num_started < num_requests) {
        if (reopen) open_connection(c);
        if (mean_us) { c->started = 0; idle[num_idle++] = c; }
        else begin(c, now_us());
    } else if (c->fd >= 0) { close(c->fd); c->fd = -1; }
}

/* The request that was due then. It may end in here: what `c` is afterwards is `finish`'s. */
static void begin(Connection *c, double due) {
    num_started++;
    c->head_len = c->in_body = c->chunked = 0;
    c->left = -1;
    c->first = 0;
    c->was_newline = 0;
    memset(c->tail, 0, 5);
    c->started = due;
    if (send(c->fd, request, request_len, MSG_NOSIGNAL) != request_len) finish(c, 0, 1);
}

/* Of an open load: what is due, and when to look again. */
static void start_due(void) {
    while (num_started < num_requests && num_idle && due_us <= now_us()) {
        Connection *c = idle[--num_idle];
        double due = due_us;
        due_us -= log(1 - drand48()) * mean_us;
        begin(c, due);
    }
    struct itimerspec at = {{0, 0}, {(long)(due_us / 1e6), (long)(due_us - (long)(due_us / 1e6) * 1e6) * 1000 + 1}};
    if (num_started < num_requests && num_idle) timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
}

/* Takes body bytes; 1 at the end of the answer. */
static int body(Connection *c, const char *data, long n) {
    for (const char *p = data, *end = data + n; p < end;) {
        const char *q = memchr(p, '\n', end - p);
        if (!q) { c->was_newline = 0; break; }
        if (q == p && c->was_newline) { num_events++; c->was_newline = 0; } else c->was_newline = 1;
        if (q > p) c->was_newline = 1;
        p = q + 1;
        if (p < end && *p != '\n') c->was_newline = 0;
    }
    if (!c->chunked) { c->left -= n; return c->left <= 0; }
    if (n >= 5) memcpy(c->tail, data + n - 5, 5);
    else if (n > 0) { memmove(c->tail, c->tail + n, 5 - n); memcpy(c->tail + 5 - n, data, n); }
    return !memcmp(c->tail, "0\r\n\r\n", 5);
}

static void readable(Connection *c) {
    static char data[1 << 18];
    long n = recv(c->fd, data, sizeof data, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (mean_us && !c->started) { close(c->fd); open_connection(c); return; }  /* Idle: its peer has closed it, as it may. */
    if (n <= 0) { finish(c, 0, 1); return; }
    if (!c->first) { c->first = now_us(); c->last = 0; num_first++; }
    long from = 0;
    if (!c->in_body) {
        long take = n < HEAD_MAX - 1 - c->head_len ? n : HEAD_MAX - 1 - c->head_len;
        long before = c->head_len;
        memcpy(c->head + c->head_len, data, take);
        c->head_len += take;
        c->head[c->head_len] = 0;
        char *end = strstr(c->head, "\r\n\r\n");
        if (!end) { if (c->head_len >= HEAD_MAX - 1) finish(c, 0, 1); return; }
        c->in_body = 1;
        end[2] = 0;
        char *length = strcasestr(c->head, "content-length:");
        c->chunked = length == NULL;
        c->left = length ? atol(length + 15) : -1;
        if (strncmp(c->head + 9, "200", 3)) {
            if (!num_errors) fprintf(stderr, "%s%.300s\n", c->head, end + 4);
            finish(c, 0, 1);
            return;
        }
        from = (end + 4 - c->head) - before;
    }
    long before_events = num_events;
    int ended = body(c, data + from, n - from);
    if (num_events > before_events) {
        double t = now_us();
        if (steps && num_first >= all_connections) time_tokens(data + from, n - from, t);
        if (c->last && num_first >= all_connections) {
            long gap = (t - c->last) / GAP_US;
            gaps[gap < NUM_GAPS ? gap : NUM_GAPS - 1]++;
            num_gaps++;
        }
        c->last = t;
    }
    if (ended) finish(c, 1, strcasestr(c->head, "connection: close") != NULL);
}

static int by_value(const void *a, const void *b) {
    double d = *(double *)a - *(double *)b;
    return d < 0 ? -1 : d > 0;
}

int main(int argc, char **argv) {
    if (argc != 5 && argc != 6 && argc != 8) return 2;
    if (argc == 6) mean_us = atof(argv[5]);
    if (argc == 8) { map_steps(argv[5]); interval_s = atof(argv[6]); limit_s = atof(argv[7]); }
    port = atoi(argv[1]);
    int num_connections = atoi(argv[2]);
    num_requests = atol(argv[3]);
    all_connections = num_connections;
    struct rlimit limit = {1 << 20, 1 << 20};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    FILE *f = fopen(argv[4], "rb");
    request = malloc(1 << 20);
    request_len = fread(request, 1, 1 << 20, f);
    totals = calloc(num_requests + num_connections, sizeof(double));
    firsts = calloc(num_requests + num_connections, sizeof(double));
    poller = epoll_create1(0);
    Connection *all = calloc(num_connections, sizeof(Connection));
    idle = calloc(num_connections, sizeof *idle);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    double started = started_us = now_us();
    for (int i = 0; i < num_connections && num_started < num_requests; i++) {
        open_connection(&all[i]);
        if (mean_us) idle[num_idle++] = &all[i];
        else begin(&all[i], now_us());
    }
    if (mean_us) {
        struct epoll_event e = {.events = EPOLLIN | EPOLLET, .data.ptr = &timer_mark};
        epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e);
        due_us = now_us();
        start_due();
    }
    double connected = now_us();
    struct epoll_event events[512];
    while (num_done < num_requests) {
        if (limit_s && now_us() - connected > limit_s * 1e6) break;
        int n = epoll_wait(poller, events, 512, limit_s ? 1000 : 60000);
        if (n == 0 && !limit_s) { fprintf(stderr, "nothing for a minute\n"); return 1; }
        for (int i = 0; i < n; i++)
            if (events[i].data.ptr != &timer_mark) readable(events[i].data.ptr);
        if (mean_us) start_due();
    }
    double seconds = (now_us() - started) / 1e6;
    qsort(totals, num_done, sizeof(double), by_value);
    qsort(firsts, num_done, sizeof(double), by_value);
    Quantiles gap = quantiles(gaps, num_gaps), delay = quantiles(delays, num_delays);
    printf("{\"requests\":%ld,\"errors\":%ld,\"events\":%ld,\"seconds\":%.4f,\"total_p50_us\":%.1f,\"total_p99_us\":%.1f,"
           "\"first_p50_us\":%.1f,\"first_p99_us\":%.1f,\"gaps\":%ld,\"gap_p50_us\":%.0f,\"gap_p99_us\":%.0f,\"gap_worst_us\":%.0f",
           num_done, num_errors, num_events, seconds, totals[num_done / 2], totals[num_done * 99 / 100],
           firsts[num_done / 2], firsts[num_done * 99 / 100], num_gaps, gap.p50, gap.p99, gap.worst);
    if (steps)
        printf(",\"tokens_timed\":%ld,\"added_p50_us\":%.0f,\"added_p99_us\":%.0f,\"added_worst_us\":%.0f", num_delays, delay.p50,
               delay.p99, delay.worst);
    printf("}\n");
    return 0;
}
