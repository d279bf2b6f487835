/* test_bootstrap_fuzz.c - messages of any bytes between the ranks of a host as they join: to the
 * first rank from unproven peers and from a linked rank, and from a first rank that lies.
 *
 * Laws: whatever unproven peers send, the rank that knows the secret is linked and given; a wrong
 * answer or fd message ends the join with a sentence; no descriptor is left open. A message is a
 * valid one after the changes of the input's script (fuzz.h). */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/bootstrap.h"
#include "fuzz.h"

enum { UNPROVEN = 3, ROOM = 512 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint8_t secret[SW_PROOF_SECRET_BYTES] = "a group's secret";

/* ---- ranks ---- */

static sw_status look(sw_comm *comm, bool minds_leaving, sw_error *err)
{
    (void)comm;
    (void)minds_leaving;
    (void)err;
    return SW_OK;
}

static void name_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES])
{
    (void)comm;
    snprintf(text, SW_COMM_PEER_BYTES, "rank %d", rank);
}

static const sw_comm_ops ops = {.look = look, .peer = name_peer};

typedef struct rank_side {
    sw_comm comm;
    sw_bootstrap bootstrap;
    sw_error err;
    sw_status status;
    int fd; /* the message's; -1: none */
    sw_fd_message fd_message;
    const char *const *addresses;
    fuzz_script *script;
    char address[SW_SOCKET_NAME_BYTES];
} rank_side;

static void side_init(rank_side *side, int rank, fuzz_script *script)
{
    *side = (rank_side){
        .comm = {.ops = &ops, .rank = rank, .world_size = 2, .timeout_ns = INT64_C(20000000000)},
        .bootstrap = {.listener = -1},
        .fd = -1,
        .script = script};
    if (sw_bootstrap_open(&side->bootstrap, &side->comm, side->address, &side->err) != SW_OK)
        exit(1);
}

static void side_fini(rank_side *side)
{
    sw_bootstrap_close(&side->bootstrap);
    sw_socket_close(&side->fd);
}

static int count_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        ++count;
    if (folder)
        closedir(folder);
    return count;
}

/* Sends a changed copy of a message, with a descriptor or without. */
static void send_changed(fuzz_script *script, int socket, const void *valid, size_t size)
{
    uint8_t bytes[ROOM] = {0};
    bool sent;
    memcpy(bytes, valid, size);
    uint8_t form = fuzz_take(script);
    size = fuzz_edit(script, form & 3, bytes, size, sizeof bytes);
    int passed = form >> 2 & 1 ? open("/dev/null", O_RDONLY | O_CLOEXEC) : -1;
    if (form >> 3 & 1)
        size = 0;
    (void)!sw_socket_send(socket, bytes, size, passed, &sent, NULL);
    sw_socket_close(&passed);
}

static bool await(int socket, void *bytes, size_t size)
{
    bool received = false;
    for (int turn = 0; turn < 2000 && !received; ++turn) {
        if (sw_socket_receive(socket, bytes, size, NULL, &received, NULL) != SW_OK)
            return false;
        if (!received)
            (void)usleep(500);
    }
    return received;
}

/* ---- the first rank, and who calls it ---- */

/* A call, and perhaps a proof, that may be wrong. Returns at once. */
static void call_as_stranger(rank_side *self)
{
    sw_proof_call call = {0};
    sw_proof_answer answer = {0};
    uint8_t proof[SW_SHA256_BYTES];
    int socket = -1;
    if (sw_socket_call(self->addresses[0], &socket, NULL) != SW_OK || socket < 0)
        return;
    if (sw_proof_begin(&call, 1, 2, NULL) == SW_OK) {
        send_changed(self->script, socket, &call, sizeof call);
        if (fuzz_take(self->script) % 4 == 1 && await(socket, &answer, sizeof answer)) {
            sw_proof_make(proof, SW_PROOF_CALLER, &call, answer.nonce, self->addresses[0], secret);
            proof[fuzz_take(self->script) % sizeof proof] ^=
                1; /* a right one would be the rank's */
            send_changed(self->script, socket, proof, sizeof proof);
        }
    }
    sw_socket_close(&socket);
}

static void *join_after_strangers(void *argument)
{
    rank_side *self = argument;
    int unproven = fuzz_take(self->script) % (UNPROVEN + 1);
    bool lies = fuzz_take(self->script) % 2;
    for (int i = 0; i < unproven; ++i)
        call_as_stranger(self);
    self->status = sw_bootstrap_call(&self->bootstrap, self->addresses, secret, &self->fd_message,
                                     &self->fd, &self->err);
    if (self->status != SW_OK)
        return NULL;
    sw_bootstrap_answer_message answer = {.serial = self->fd_message.serial};
    if (lies)
        send_changed(self->script, self->bootstrap.link[0], &answer, sizeof answer);
    else
        self->status = sw_bootstrap_answer(&self->bootstrap, "the test", answer.serial, SW_OK, NULL,
                                           &self->err);
    if (lies) /* the first rank may wait for more of it */
        sw_socket_close(&self->bootstrap.link[0]);
    return NULL;
}

static bool is_told(sw_status status, const sw_error *err)
{
    return err->status == status && err->message[0] && strlen(err->message) < sizeof err->message;
}

static void try_first(fuzz_script *script)
{
    rank_side first, other;
    pthread_t thread;
    sw_fd_message fd_message = {.size_bytes = 4096, .serial = 0};
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    side_init(&first, 0, script);
    side_init(&other, 1, script);
    const char *const addresses[2] = {first.address, other.address};
    first.addresses = other.addresses = addresses;
    if (fd < 0 || pthread_create(&thread, NULL, join_after_strangers, &other) != 0)
        exit(1);
    first.status =
        sw_bootstrap_admit(&first.bootstrap, addresses, secret, &fd_message, fd, &first.err);
    pthread_join(thread, NULL);
    fuzz_require(other.status == SW_OK && other.fd_message.size_bytes == fd_message.size_bytes &&
                     other.fd >= 0,
                 "the rank that knows the secret is given");
    fuzz_require(first.status == SW_OK || is_told(first.status, &first.err),
                 "the first rank says why it fails");
    close(fd);
    side_fini(&first);
    side_fini(&other);
}

/* ---- a first rank that lies ---- */

static void *lie(void *argument)
{
    rank_side *first = argument;
    sw_proof_call call;
    sw_proof_answer answer;
    uint8_t proof[SW_SHA256_BYTES];
    const sw_fd_message fd_message = {.size_bytes = 4096, .serial = 7};
    int socket = -1;
    for (int turn = 0; turn < 20000 && socket < 0; ++turn) {
        if (sw_socket_accept(first->bootstrap.listener, &socket, NULL) != SW_OK)
            break;
        if (socket < 0)
            (void)usleep(200);
    }
    sw_socket_close(&first->bootstrap.listener); /* a second call finds no one */
    if (socket >= 0 && await(socket, &call, sizeof call) &&
        sw_proof_answer_call(&answer, &call, first->address, secret, NULL) == SW_OK) {
        send_changed(first->script, socket, &answer, sizeof answer);
        if (await(socket, proof, sizeof proof))
            send_changed(first->script, socket, &fd_message, sizeof fd_message);
    }
    sw_socket_close(&socket);
    return NULL;
}

static void try_other(fuzz_script *script)
{
    rank_side first, other;
    pthread_t thread;
    side_init(&first, 0, script);
    side_init(&other, 1, script);
    const char *const addresses[2] = {first.address, other.address};
    if (pthread_create(&thread, NULL, lie, &first) != 0)
        exit(1);
    other.status = sw_bootstrap_call(&other.bootstrap, addresses, secret, &other.fd_message,
                                     &other.fd, &other.err);
    pthread_join(thread, NULL);
    fuzz_require(other.status == SW_OK || (is_told(other.status, &other.err) && other.fd < 0),
                 "a join that fails says why, and has no descriptor");
    side_fini(&first);
    side_fini(&other);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_script script = {data, size};
    int before = count_descriptors();
    if (fuzz_take(&script) % 2)
        try_first(&script);
    else
        try_other(&script);
    fuzz_require(count_descriptors() == before, "every descriptor is closed");
    return 0;
}

#ifndef SW_LIBFUZZER
int main(int argc, char **argv)
{
    static const fuzz_seed seeds[] = {
        FUZZ_SEED("\x01\x02\x00\x00\x01\x00\x00\x00\x01\x00\x00"),
        FUZZ_SEED("\x01\x00\x01\x01\x04\x00\x02\x07"),
        FUZZ_SEED("\x00\x00\x04"),
        FUZZ_SEED("\x00\x01\x03\x00\x00\x01"),
        FUZZ_SEED("\x00\x00\x0c"),
    };
    const fuzz_plan plan = {.target = LLVMFuzzerTestOneInput,
                            .seeds = seeds,
                            .seed_count = sizeof seeds / sizeof *seeds,
                            .quick = 400,
                            .thorough = 5000};
    return fuzz_main(argc, argv, &plan);
}
#endif
