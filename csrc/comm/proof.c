/* proof.c - see the header. */
#include "comm/proof.h"

#include <string.h>

#include "platform/socket.h"

enum { MAGIC = 0x53574833 /* "SWH3": changes with the pages and messages between ranks */ };

typedef struct transcript {
    uint32_t role;
    sw_proof_call call;
    uint8_t listener_nonce[SW_PROOF_NONCE_BYTES];
    char name[SW_SOCKET_NAME_BYTES];
} transcript;

sw_status sw_proof_begin(sw_proof_call *call, int rank, int world_size, sw_error *err)
{
    *call = (sw_proof_call){.magic = MAGIC, .rank = rank, .world_size = world_size};
    return sw_random_fill(call->nonce, sizeof call->nonce, err);
}

bool sw_proof_is_call(const sw_proof_call *call)
{
    return call->magic == MAGIC;
}

void sw_proof_make(uint8_t proof[SW_SHA256_BYTES], sw_proof_role role, const sw_proof_call *call,
                   const uint8_t *listener_nonce, const char *name, const uint8_t *secret)
{
    transcript exchanged;
    memset(&exchanged, 0, sizeof exchanged); /* padding bytes are compared too */
    exchanged.role = (uint32_t)role;
    exchanged.call = *call;
    memcpy(exchanged.listener_nonce, listener_nonce, sizeof exchanged.listener_nonce);
    memcpy(exchanged.name, name, strnlen(name, sizeof exchanged.name));
    sw_hmac_sha256(secret, SW_PROOF_SECRET_BYTES, &exchanged, sizeof exchanged, proof);
}

sw_status sw_proof_answer_call(sw_proof_answer *answer, const sw_proof_call *call, const char *name,
                               const uint8_t *secret, sw_error *err)
{
    SW_TRY(sw_random_fill(answer->nonce, sizeof answer->nonce, err));
    sw_proof_make(answer->proof, SW_PROOF_LISTENER, call, answer->nonce, name, secret);
    return SW_OK;
}
