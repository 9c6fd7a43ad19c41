/* The exact server, in C: see __init__.py for what it does. Linux: epoll and a timerfd, one thread, no allocation
 * while it streams but for its log.
 *
 *     exact LO HI INTERVAL_US JITTER_US FIRST_US SEED
 *
 * Prints "port N" and ends when its standard input does.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 4096
#define IN_SIZE (1 << 20)

typedef struct { int64_t time; int tokens; } Write;
typedef struct { uint64_t number; int64_t received; int count, room; Write *writes; } Entry;

typedef struct {
    char *in; size_t in_len;                 /* what was read and is not yet a whole request */
    char *out; size_t out_len, out_room;     /* what the socket did not take yet */
    uint64_t number, random; int64_t received, due;
    int chat, continuous, total, sent, index, next_tokens, heap; /* heap: place in the heap, -1 when idle */
    size_t entry;
} Connection;

static Connection *connections[MAX_FDS];
static int heap[MAX_FDS], heap_len;
static Entry *entries; static size_t entry_count, entry_room;
static int lo, hi, poller; static int64_t interval, jitter, first; static uint64_t seed, unnumbered;

static int64_t now(void) {
    struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static void *grown(void *memory, size_t bytes) {
    void *result = realloc(memory, bytes);
    if (!result) { perror("exact"); exit(1); }
    return result;
}

/* ---- the heap of streams by due time ---- */

static int64_t due_of(int place) { return connections[heap[place]]->due; }

static void put(int place, int fd) { heap[place] = fd; connections[fd]->heap = place; }

static void sift_up(int place, int fd) {
    while (place > 0 && due_of((place - 1) / 2) > connections[fd]->due) { put(place, heap[(place - 1) / 2]); place = (place - 1) / 2; }
    put(place, fd);
}

static void sift_down(int place, int fd) {
    for (;;) {
        int child = 2 * place + 1;
        if (child >= heap_len) break;
        if (child + 1 < heap_len && due_of(child + 1) < due_of(child)) child++;
        if (due_of(child) >= connections[fd]->due) break;
        put(place, heap[child]); place = child;
    }
    put(place, fd);
}

static void leave(int fd) {
    int place = connections[fd]->heap, last;
    if (place < 0) return;
    connections[fd]->heap = -1;
    last = heap[--heap_len];
    if (last == fd) return;
    sift_down(place, last);
    sift_up(connections[last]->heap, last);
}

/* ---- connections ---- */

static void drop(int fd) {
    Connection *c = connections[fd];
    leave(fd); close(fd);
    free(c->in); free(c->out); free(c);
    connections[fd] = NULL;
}

static void watch(int fd, int writable) {
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
}

static void say(int fd, const char *data, size_t length) {
    Connection *c = connections[fd];
    if (!c->out_len) {
        ssize_t taken = send(fd, data, length, MSG_NOSIGNAL);
        if (taken == (ssize_t)length) return;
        if (taken < 0 && errno != EAGAIN) return; /* the reader is gone; epoll tells */
        if (taken > 0) { data += taken; length -= (size_t)taken; }
        watch(fd, 1);
    }
    if (c->out_len + length > c->out_room) c->out = grown(c->out, c->out_room = 2 * (c->out_len + length));
    memcpy(c->out + c->out_len, data, length);
    c->out_len += length;
}

static void flush_out(int fd) {
    Connection *c = connections[fd];
    ssize_t taken = send(fd, c->out, c->out_len, MSG_NOSIGNAL);
    if (taken <= 0) return;
    memmove(c->out, c->out + taken, c->out_len -= (size_t)taken);
    if (!c->out_len) watch(fd, 0);
}

/* ---- streams ---- */

static void schedule(Connection *c) {
    uint64_t r = next_random(&c->random);
    c->next_tokens = lo + (int)((r & 0xffffffff) % (uint64_t)(hi - lo + 1));
    if (c->next_tokens > c->total - c->sent) c->next_tokens = c->total - c->sent;
    c->due = c->received + first + c->index * interval + (int64_t)((r >> 32) % (uint64_t)(jitter + 1));
}

static size_t chunk(char *to, const char *body, size_t length) {
    size_t n = (size_t)sprintf(to, "%zx\r\n", length);
    memcpy(to + n, body, length); n += length;
    memcpy(to + n, "\r\n", 2);
    return n + 2;
}

static const char *object_of(const Connection *c) { return c->chat ? "chat.completion.chunk" : "text_completion"; }

static size_t event(char *to, Connection *c, int tokens, int last) {
    char body[2048], text[256], usage[128] = ""; size_t n = 0; int i;
    for (i = 0; i < tokens && i < 40; i++) n += (size_t)sprintf(text + n, " tok");
    text[n] = 0;
    if (c->continuous) sprintf(usage, ",\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":%d}", c->sent);
    n = (size_t)sprintf(body, "data: {\"id\":\"%llu\",\"object\":\"%s\",\"created\":0,\"model\":\"exact\",\"choices\":[{\"index\":0,%s%s%s,\"finish_reason\":%s}]%s}\n\n",
        (unsigned long long)c->number, object_of(c), c->chat ? "\"delta\":{\"content\":\"" : "\"text\":\"", text, c->chat ? "\"}" : "\"",
        last ? "\"length\"" : "null", usage);
    return chunk(to, body, n);
}

static void write_chunk(int fd) {
    Connection *c = connections[fd];
    char data[8192], body[512]; size_t n = 0; int tokens = c->next_tokens, last;
    Entry *entry = &entries[c->entry];
    c->sent += tokens; c->index++;
    last = c->sent >= c->total;
    n = event(data, c, tokens, last);
    if (last) {
        size_t m = (size_t)sprintf(body, "data: {\"id\":\"%llu\",\"object\":\"%s\",\"created\":0,\"model\":\"exact\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":%d}}\n\n",
            (unsigned long long)c->number, object_of(c), c->sent);
        n += chunk(data + n, body, m);
        n += chunk(data + n, "data: [DONE]\n\n", 14);
        n += (size_t)sprintf(data + n, "0\r\n\r\n");
        leave(fd);
    }
    if (entry->count == entry->room) entry->writes = grown(entry->writes, sizeof(Write) * (size_t)(entry->room = 2 * entry->room + 64));
    entry->writes[entry->count].tokens = tokens;
    entry->writes[entry->count++].time = now();
    say(fd, data, n);
    if (!last) { schedule(c); sift_down(c->heap, fd); }
}

static long find(const char *body, const char *name, long missing) {
    const char *at = strstr(body, name);
    if (!at) return missing;
    at += strlen(name);
    while (*at == ' ' || *at == ':') at++;
    return *at == 't' ? 1 : strtol(at, NULL, 10);
}

static void begin(int fd, const char *path, const char *body, int64_t received) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    Connection *c = connections[fd];
    long number = find(body, "\"seed\"", -1);
    c->number = number >= 0 ? (uint64_t)number : 1000000000 + unnumbered++;
    c->chat = strstr(path, "chat") != NULL;
    c->continuous = find(body, "\"continuous_usage_stats\"", 0) == 1;
    c->total = (int)find(body, "\"max_tokens\"", find(body, "\"max_completion_tokens\"", 16));
    c->sent = c->index = 0;
    c->received = received;
    c->random = seed ^ (c->number * 0xD1342543DE82EF95ull);
    if (entry_count == entry_room) entries = grown(entries, sizeof(Entry) * (entry_room = 2 * entry_room + 1024));
    c->entry = entry_count++;
    entries[c->entry] = (Entry){c->number, received, 0, 0, NULL};
    say(fd, head, sizeof head - 1);
    schedule(c);
    sift_up(heap_len++, fd);
}

/* ---- requests ---- */

static void answer(int fd, const char *type, const char *data, size_t length) {
    char head[160];
    int n = sprintf(head, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, length);
    say(fd, head, (size_t)n);
    say(fd, data, length);
}

static void tell_log(int fd) {
    char *text = NULL; size_t length = 0, i; int j;
    FILE *out = open_memstream(&text, &length);
    for (i = 0; i < entry_count; i++) {
        fprintf(out, "%llu %lld", (unsigned long long)entries[i].number, (long long)entries[i].received);
        for (j = 0; j < entries[i].count; j++) fprintf(out, " %lld:%d", (long long)entries[i].writes[j].time, entries[i].writes[j].tokens);
        fputc('\n', out);
    }
    fclose(out);
    answer(fd, "text/plain", text, length);
    free(text);
    if (!heap_len) { for (i = 0; i < entry_count; i++) free(entries[i].writes); entry_count = 0; }
}

static void take_requests(int fd, int64_t received) {
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"exact\",\"object\":\"model\"}]}";
    Connection *c = connections[fd];
    char *end;
    while ((end = memmem(c->in, c->in_len, "\r\n\r\n", 4))) {
        size_t head = (size_t)(end - c->in) + 4, body = 0, total;
        char *length, kept;
        *end = 0;
        if ((length = strcasestr(c->in, "content-length:"))) body = (size_t)strtoul(length + 15, NULL, 10);
        if (c->in_len < head + body) { *end = '\r'; return; }
        total = head + body;
        kept = c->in[total]; c->in[total] = 0;
        if (!strncmp(c->in, "POST", 4)) begin(fd, c->in, c->in + head, received);
        else if (strstr(c->in, " /log ")) tell_log(fd);
        else answer(fd, "application/json", models, sizeof models - 1);
        c->in[total] = kept;
        memmove(c->in, c->in + total, c->in_len -= total);
    }
}

static void read_from(int fd) {
    Connection *c = connections[fd];
    ssize_t n = c->in_len < IN_SIZE ? recv(fd, c->in + c->in_len, IN_SIZE - c->in_len, 0) : 0;
    int64_t received = now();
    if (n <= 0) { if (!(n < 0 && errno == EAGAIN)) drop(fd); return; }
    c->in_len += (size_t)n;
    take_requests(fd, received);
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        if (fd >= MAX_FDS) { close(fd); continue; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connections[fd] = calloc(1, sizeof(Connection));
        if (!connections[fd]) exit(1);
        connections[fd]->in = grown(NULL, IN_SIZE + 1);
        connections[fd]->heap = -1;
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void set_timer(int timer) {
    struct itimerspec when = {0};
    if (heap_len) {
        int64_t due = due_of(0);
        when.it_value.tv_sec = due / 1000000000;
        when.it_value.tv_nsec = due % 1000000000;
    }
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
}

static void serve(int listener) {
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC), i, fds[3] = {listener, timer, 0};
    poller = epoll_create1(EPOLL_CLOEXEC);
    for (i = 0; i < 3; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fds[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, fds[i], &event);
    }
    for (;;) {
        struct epoll_event ready[256];
        int n = epoll_wait(poller, ready, 256, -1);
        while (heap_len && due_of(0) <= now()) write_chunk(heap[0]);
        for (i = 0; i < n; i++) {
            int fd = ready[i].data.fd; char rest[64];
            if (fd == listener) accept_all(fd);
            else if (fd == 0) { if (read(0, rest, sizeof rest) <= 0) return; }
            else if (fd != timer && connections[fd]) {
                if (ready[i].events & EPOLLOUT) flush_out(fd);
                if (connections[fd] && ready[i].events & ~(uint32_t)EPOLLOUT) read_from(fd);
            }
        }
        set_timer(timer); /* setting it also clears what it had to say */
    }
}

int main(int argc, char **argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (argc != 7) { fprintf(stderr, "exact LO HI INTERVAL_US JITTER_US FIRST_US SEED\n"); return 2; }
    lo = atoi(argv[1]); hi = atoi(argv[2]);
    interval = atoll(argv[3]) * 1000; jitter = atoll(argv[4]) * 1000; first = atoll(argv[5]) * 1000;
    seed = strtoull(argv[6], NULL, 10);
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1024)) { perror("exact"); return 1; }
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("port %d\n", ntohs(address.sin_port));
    fflush(stdout);
    serve(listener);
    return 0;
}
