/*
 * A ring of RC queue pairs over libibverbs: rank i sends to rank i+1 and receives from rank i-1.
 *
 * It is what an application does that knows nothing of the box. It has queue pairs, says where they
 * are, is told where its neighbours' are, and sends messages, at most `window` of them ahead of
 * those that it has received. If a box between the ranks sums, each receives the sum over all ranks
 * (--expect sum), else what its neighbour sent (--expect neighbour). Every lane of every message is
 * checked.
 *
 * Messages are SENDs, or RDMA WRITEs whose receiver is told by their immediate data or, if they
 * have none (--op plain-write), by an empty SEND behind them. Of several sizes (--size 4,1024) each
 * message has the next. With --op read a rank asks for what it would have sent.
 *
 * With the in-band token of its job (--token) messages begin with the header by which the box finds
 * the ring itself. libnetsum writes it; other rings run without that library.
 *
 * Whoever launches the ranks speaks with them in lines:
 *
 *   > here GID QPN PSN RKEY ADDRESS QPN PSN      of the pair that receives, and of the one that sends
 *   < GID QPN PSN RKEY ADDRESS GID QPN PSN       the next rank's that receives, the last one's that sends
 *   > ready
 *   < go
 *   > done messages=M wrong=LANES first_wrong=MESSAGE micros=T
 *   < (end of input, once all ranks are done: until then neighbours may need acknowledgements)
 *
 * When a connection ends in an error, the line is `failed` with the same figures, and the reason is
 * on standard error.
 */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <getopt.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netsum.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum op { SEND, SEND_IMM, WRITE, PLAIN_WRITE, READ };

static struct {
    const char *device, *token;
    int gid_index, port;
    uint32_t rank, ranks, mtu, size[16], sizes, messages, window, timeout, retry, seed;
    enum op op;
    bool sum;
    int give_up_after; /* seconds without a message after which it gives up */
} opt = {
    .gid_index = 1, .port = 1, .ranks = 2, .mtu = 1024, .size = { 128 << 10 }, .sizes = 1, .messages = 100, .window = 2,
    .timeout = 16, .retry = 7, .seed = 1, .sum = true, .give_up_after = 60,
};

static _Noreturn void die(const char *format, ...)
{
    int error = errno;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "ring: rank %" PRIu32 ": ", opt.rank);
    vfprintf(stderr, format, args);
    fprintf(stderr, error ? ": %s\n" : "\n", strerror(error));
    va_end(args);
    exit(1);
}

/* One end of a connection. */
struct end {
    union ibv_gid gid;
    uint32_t qpn, psn, rkey;
    uint64_t address;
};

static struct ibv_context *context;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *from, *to; /* the last rank, the next */
static struct ibv_mr *in_mr, *out_mr;
static uint8_t *in, *out;
static struct end next;

/* Slots for messages that arrive. A rank that sends message m has received m - window, which its neighbour had sent, who had
 * received m - 2 window, and so round the ring: so the next rank has received, and checked, m -
 * ranks * window. */
static uint32_t slots(void)
{
    return opt.ranks * opt.window;
}

/* Bytes of a message. */
static uint32_t size(uint32_t message)
{
    return opt.size[message % opt.sizes];
}

/* Bytes from one slot to the next: the largest message, in whole lanes. */
static uint32_t stride(void)
{
    uint32_t largest = 0;
    for (uint32_t i = 0; i < opt.sizes; i++)
        largest = opt.size[i] > largest ? opt.size[i] : largest;
    return (largest + 3) & ~3u;
}

static __typeof__(netsum_job_header) *job_header;

/* Lane i of the header of rank r's message m; of one size, as all of a job that the box sums. */
static uint32_t header_lane(uint32_t r, uint32_t m, uint32_t i)
{
    uint32_t lanes[NETSUM_JOB_HEADER_SIZE / 4], packets = (size(m) + opt.mtu - 1) / opt.mtu;
    netsum_message message = {
        .token = opt.token, .rank = r, .ranks = opt.ranks, .number = m,
        .packets = packets, .packets_before = m * packets,
    };
    errno = 0;
    if (job_header(&message, (uint8_t *)lanes))
        die("no header");
    return le32toh(lanes[i]);
}

/* Lane i of rank r's message m. */
static uint32_t lane(uint32_t r, uint32_t m, uint32_t i)
{
    if (opt.token && i < NETSUM_JOB_HEADER_SIZE / 4)
        return header_lane(r, m, i);
    uint32_t x = (r + opt.seed) * 0x9e3779b1u + m * 0x85ebca77u + i * 0xc2b2ae3du;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    return x ^ x >> 12;
}

static int64_t micros(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

static uint32_t random24(void)
{
    uint32_t x = 0;
    FILE *f = fopen("/dev/urandom", "r");
    if (!f || fread(&x, sizeof x, 1, f) != 1)
        die("/dev/urandom");
    fclose(f);
    return x & 0xffffff;
}

static enum ibv_mtu path_mtu(void)
{
    switch (opt.mtu) {
    case 256: return IBV_MTU_256;
    case 512: return IBV_MTU_512;
    case 1024: return IBV_MTU_1024;
    case 2048: return IBV_MTU_2048;
    case 4096: return IBV_MTU_4096;
    }
    errno = 0;
    die("--mtu %" PRIu32 ": 256, 512, 1024, 2048 and 4096 are possible", opt.mtu);
}

static void open_device(void)
{
    int n = 0;
    struct ibv_device **all = ibv_get_device_list(&n);
    for (int i = 0; i < n && !context; i++)
        if (!opt.device || !strcmp(opt.device, ibv_get_device_name(all[i])))
            context = ibv_open_device(all[i]);
    if (!context)
        die("no RDMA device %s", opt.device ? opt.device : "at all");
    ibv_free_device_list(all);
}

static struct ibv_qp *queue_pair(struct ibv_pd *pd)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = { .max_send_wr = 2 * opt.window + 1, .max_recv_wr = slots() + 1, .max_send_sge = 1, .max_recv_sge = 1 },
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = opt.port, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
    };
    if (!qp || ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        die("cannot make a queue pair");
    return qp;
}

static void connect_pair(struct ibv_qp *qp, uint32_t psn, const struct end *peer)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = path_mtu(),
        .dest_qp_num = peer->qpn,
        .rq_psn = peer->psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {
            .is_global = 1,
            .port_num = opt.port,
            .grh = { .dgid = peer->gid, .sgid_index = opt.gid_index, .hop_limit = 64 },
        },
    };
    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        die("cannot make queue pair %" PRIu32 " ready to receive", qp->qp_num);
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = opt.timeout;
    attr.retry_cnt = opt.retry;
    attr.rnr_retry = 7;
    attr.sq_psn = psn;
    attr.max_rd_atomic = 1;
    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        die("cannot make queue pair %" PRIu32 " ready to send", qp->qp_num);
}

static void post_receive(uint32_t message)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)in + (uint64_t)(message % slots()) * stride(), .length = stride(), .lkey = in_mr->lkey,
    };
    /* Data of an RDMA WRITE goes to the address in it; only its immediate, or the SEND behind it, takes a receive. */
    bool send = opt.op == SEND || opt.op == SEND_IMM;
    struct ibv_recv_wr wr = { .wr_id = message, .sg_list = &sge, .num_sge = send ? 1 : 0 }, *bad;
    if ((errno = ibv_post_recv(from, &wr, &bad)))
        die("cannot post a receive");
}

static void post_send(uint32_t message)
{
    static const enum ibv_wr_opcode opcodes[] = {
        IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
    };
    uint8_t *buffer = out + (uint64_t)(message % opt.window) * stride();
    for (uint32_t i = 0; 4 * i < stride(); i++) {
        uint32_t x = htole32(lane(opt.rank, message, i));
        memcpy(buffer + 4 * i, &x, 4);
    }
    struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = size(message), .lkey = out_mr->lkey };
    struct ibv_send_wr wr = {
        .wr_id = message, .sg_list = &sge, .num_sge = 1, .opcode = opcodes[opt.op], .send_flags = IBV_SEND_SIGNALED,
        .imm_data = htonl(message),
    }, told = wr, *bad;
    if (opt.op == WRITE || opt.op == PLAIN_WRITE || opt.op == READ) {
        wr.wr.rdma.rkey = next.rkey;
        wr.wr.rdma.remote_addr = next.address + (uint64_t)(message % slots()) * stride();
    }
    if (opt.op == PLAIN_WRITE) {
        told.opcode = IBV_WR_SEND;
        told.num_sge = 0;
        wr.send_flags = 0;
        wr.next = &told;
    }
    if ((errno = ibv_post_send(to, &wr, &bad)))
        die("cannot post a send");
}

/* Lanes of a message that are not what they should be. */
static uint32_t wrong_lanes(uint32_t message)
{
    const uint8_t *buffer = in + (uint64_t)(message % slots()) * stride();
    uint32_t wrong = 0, last = (opt.rank + opt.ranks - 1) % opt.ranks;
    for (uint32_t i = 0; 4 * i < size(message); i++) {
        uint32_t expected = 0;
        if (opt.sum)
            for (uint32_t r = 0; r < opt.ranks; r++)
                expected += lane(r, message, i);
        else
            expected = lane(last, message, i);
        uint32_t rest = size(message) - 4 * i;
        expected = htole32(expected);
        wrong += memcmp(buffer + 4 * i, &expected, rest < 4 ? rest : 4) != 0;
    }
    return wrong;
}

static bool wait_for_event(void)
{
    struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
    int n = poll(&fd, 1, opt.give_up_after * 1000);
    if (n <= 0)
        return false;
    struct ibv_cq *which;
    void *unused;
    if (ibv_get_cq_event(channel, &which, &unused))
        die("completion channel");
    ibv_ack_cq_events(which, 1);
    return true;
}

static void report(const char *word, uint32_t received, uint64_t wrong, uint32_t first_wrong, int64_t start)
{
    printf("%s messages=%" PRIu32 " wrong=%" PRIu64 " first_wrong=%" PRIu32 " micros=%" PRId64 "\n", word, received,
           wrong, first_wrong, micros() - start);
    fflush(stdout);
}

static void run(void)
{
    uint32_t posted = 0, sent = 0, received = 0, first_wrong = 0;
    uint64_t wrong = 0;
    int64_t start = micros();
    while (sent < opt.messages || received < opt.messages) {
        while (posted < opt.messages && posted < sent + opt.window && posted < received + opt.window)
            post_send(posted++);
        struct ibv_wc wc;
        int n = ibv_poll_cq(cq, 1, &wc);
        if (n == 0) {
            /* What completes between the look and the wish to be told is found by the second look. */
            if ((errno = ibv_req_notify_cq(cq, 0)))
                die("completion queue");
            n = ibv_poll_cq(cq, 1, &wc);
        }
        if (n < 0)
            die("completion queue");
        if (n == 0) {
            if (wait_for_event())
                continue;
            report("failed", received, wrong, first_wrong, start);
            errno = 0;
            die("nothing within %d s: %" PRIu32 " messages sent and acknowledged, %" PRIu32 " received", opt.give_up_after,
                sent, received);
        }
        errno = 0;
        if (wc.status != IBV_WC_SUCCESS) {
            report("failed", received, wrong, first_wrong, start);
            die("%s %" PRIu64 ": %s", wc.qp_num == to->qp_num ? "sending" : "receiving", wc.wr_id,
                ibv_wc_status_str(wc.status));
        }
        if (wc.qp_num == to->qp_num) {
            sent++;
            continue;
        }
        bool immediate = opt.op == SEND_IMM || opt.op == WRITE;
        uint32_t bytes = opt.op == PLAIN_WRITE ? 0 : size(received);
        if (wc.byte_len != bytes || immediate != !!(wc.wc_flags & IBV_WC_WITH_IMM) ||
            (immediate && ntohl(wc.imm_data) != received))
            die("message %" PRIu32 " has %" PRIu32 " bytes and immediate %" PRIu32, received, wc.byte_len,
                ntohl(wc.imm_data));
        uint32_t lanes = wrong_lanes(received);
        if (lanes && !wrong)
            first_wrong = received;
        wrong += lanes;
        post_receive(received + slots());
        received++;
    }
    report("done", received, wrong, first_wrong, start);
}

static void print_gid(const union ibv_gid *gid)
{
    for (int i = 0; i < 16; i++)
        printf("%02x", gid->raw[i]);
}

static union ibv_gid parse_gid(const char *text)
{
    union ibv_gid gid;
    for (int i = 0; i < 16; i++)
        if (sscanf(text + 2 * i, "%2hhx", &gid.raw[i]) != 1)
            die("no GID: %s", text);
    return gid;
}

/* One of some words; its place. */
static int word(const char *text, int count, const char *const *words)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(text, words[i]))
            return i;
    errno = 0;
    die("not known: %s", text);
}

static uint32_t number(const char *text)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 0);
    if (errno || *end || end == text || value > UINT32_MAX) {
        errno = 0;
        die("no number: %s", text);
    }
    return value;
}

static void options(int argc, char **argv)
{
    static const struct option names[] = {
        { "rank", 1, NULL, 'r' },     { "ranks", 1, NULL, 'n' },  { "device", 1, NULL, 'd' },
        { "gid-index", 1, NULL, 'g' }, { "mtu", 1, NULL, 'm' },    { "size", 1, NULL, 's' },
        { "messages", 1, NULL, 'M' }, { "window", 1, NULL, 'w' }, { "timeout", 1, NULL, 't' },
        { "op", 1, NULL, 'o' },       { "expect", 1, NULL, 'e' }, { "seed", 1, NULL, 'S' },
        { "give-up-after", 1, NULL, 'p' }, { "retry", 1, NULL, 'R' },  { "token", 1, NULL, 'k' },
        { NULL, 0, NULL, 0 },
    };
    static const char *const ops[] = { "send", "send-imm", "write", "plain-write", "read" };
    static const char *const expectations[] = { "sum", "neighbour" };
    int c;
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (c) {
        case 'r': opt.rank = number(optarg); break;
        case 'n': opt.ranks = number(optarg); break;
        case 'd': opt.device = optarg; break;
        case 'g': opt.gid_index = number(optarg); break;
        case 'm': opt.mtu = number(optarg); break;
        case 's':
            opt.sizes = 0;
            for (char *size = strtok(optarg, ","); size && opt.sizes < 16; size = strtok(NULL, ","))
                opt.size[opt.sizes++] = number(size);
            break;
        case 'M': opt.messages = number(optarg); break;
        case 'w': opt.window = number(optarg); break;
        case 't': opt.timeout = number(optarg); break;
        case 'o': opt.op = word(optarg, 5, ops); break;
        case 'e': opt.sum = !word(optarg, 2, expectations); break;
        case 'S': opt.seed = number(optarg); break;
        case 'R': opt.retry = number(optarg); break;
        case 'p': opt.give_up_after = number(optarg); break;
        case 'k': opt.token = optarg; break;
        default: exit(2);
        }
    }
    errno = 0;
    bool lanes = true;
    for (uint32_t i = 0; i < opt.sizes; i++)
        lanes &= opt.size[i] % 4 == 0;
    if (optind < argc || opt.rank >= opt.ranks || !opt.window || !stride() || (opt.sum && !lanes) || opt.timeout > 31 ||
        opt.retry > 7 || (opt.token && (opt.sizes > 1 || size(0) < NETSUM_JOB_HEADER_SIZE)))
        die("impossible arguments");
}

int main(int argc, char **argv)
{
    options(argc, argv);
    if (opt.token) {
        void *library = dlopen("libnetsum.so.1", RTLD_NOW);
        job_header = library ? (__typeof__(job_header))dlsym(library, "netsum_job_header") : NULL;
        if (!job_header)
            die("%s", dlerror());
    }
    open_device();
    union ibv_gid gid;
    struct ibv_pd *pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    if (!pd || !channel || ibv_query_gid(context, opt.port, opt.gid_index, &gid))
        die("cannot set up");
    cq = ibv_create_cq(context, slots() + opt.window + 2, NULL, channel, 0);
    in = calloc(slots(), stride());
    out = calloc(opt.window, stride());
    if (!cq || !in || !out)
        die("no memory");
    in_mr = ibv_reg_mr(pd, in, (size_t)slots() * stride(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    out_mr = ibv_reg_mr(pd, out, (size_t)opt.window * stride(), IBV_ACCESS_LOCAL_WRITE);
    if (!in_mr || !out_mr)
        die("cannot register memory");
    from = queue_pair(pd);
    to = queue_pair(pd);
    uint32_t from_psn = random24(), to_psn = random24();
    printf("here ");
    print_gid(&gid);
    printf(" %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIuPTR " %" PRIu32 " %" PRIu32 "\n", from->qp_num, from_psn,
           in_mr->rkey, (uintptr_t)in, to->qp_num, to_psn);
    fflush(stdout);

    char gids[2][64], line[512];
    struct end last = { 0 };
    errno = 0;
    if (!fgets(line, sizeof line, stdin) ||
        sscanf(line, "%40s %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu64 " %40s %" SCNu32 " %" SCNu32, gids[0], &next.qpn,
               &next.psn, &next.rkey, &next.address, gids[1], &last.qpn, &last.psn) != 8)
        die("not told where the neighbours are");
    next.gid = parse_gid(gids[0]);
    last.gid = parse_gid(gids[1]);
    connect_pair(from, from_psn, &last);
    connect_pair(to, to_psn, &next);
    for (uint32_t m = 0; m < slots(); m++)
        post_receive(m);
    printf("ready\n");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin) || strcmp(line, "go\n"))
        die("not told to go");
    run();
    while (fgets(line, sizeof line, stdin))
        ;
    return 0;
}
