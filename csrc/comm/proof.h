/* proof.h - mutual proof of two processes that they know a secret, without sending it.
 *
 * Each process draws a nonce. It sends the HMAC-SHA-256, with the secret as key, of both nonces,
 * its role, the caller's rank and the listener's name. So no message can be replayed, used in
 * another role or for another rank, or forwarded by a process that impersonates the listener.
 *
 * Thread rule: any. */
#ifndef SW_COMM_PROOF_H
#define SW_COMM_PROOF_H

#include "base/sha256.h"
#include "base/status.h"

enum { SW_PROOF_SECRET_BYTES = 16, SW_PROOF_NONCE_BYTES = 16 };

typedef struct sw_proof_call { /* the caller's first message */
    uint32_t magic;            /* the version of the pages and messages */
    int32_t rank, world_size;
    uint8_t nonce[SW_PROOF_NONCE_BYTES];
} sw_proof_call;

typedef struct sw_proof_answer { /* the listener's */
    uint8_t nonce[SW_PROOF_NONCE_BYTES];
    uint8_t proof[SW_SHA256_BYTES];
} sw_proof_answer;

typedef enum sw_proof_role { SW_PROOF_CALLER = 1, SW_PROOF_LISTENER } sw_proof_role;

SW_MUST_USE sw_status sw_proof_begin(sw_proof_call *call, int rank, int world_size, sw_error *err);
/* Return true if a message may be a call of this version. */
bool sw_proof_is_call(const sw_proof_call *call);
/* Draw the listener's nonce and compute its proof. */
SW_MUST_USE sw_status sw_proof_answer_call(sw_proof_answer *answer, const sw_proof_call *call,
                                           const char *name, const uint8_t *secret, sw_error *err);
/* Compute the proof that `role` must send in this exchange. */
void sw_proof_make(uint8_t proof[SW_SHA256_BYTES], sw_proof_role role, const sw_proof_call *call,
                   const uint8_t *listener_nonce, const char *name, const uint8_t *secret);

#endif
