/* fuzz.h - the plain driver of fuzz targets, for where libFuzzer is not: it changes seeds at
 * random. And edits: a target that must say something valid first, such as a message with a proof,
 * makes it, and takes its input as a script of changes.
 *
 * Thread rule: owner only. */
#ifndef SW_TEST_FUZZ_H
#define SW_TEST_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int fuzz_target(const uint8_t *data, size_t size);

typedef struct fuzz_seed {
    const char *text;
    size_t size;
} fuzz_seed;
#define FUZZ_SEED(text) {(text), sizeof(text) - 1}

typedef struct fuzz_plan {
    fuzz_target *target;
    const fuzz_seed *seeds; /* their first byte stays: it selects what is tried */
    size_t seed_count;
    const char *const *pieces; /* what is put into them, beside edges of integers */
    size_t piece_count;
    long quick, thorough; /* inputs of a test, and of the long form */
} fuzz_plan;

/* The main program: argv[1] is the number of inputs; without it the plan's. Returns 0. */
int fuzz_main(int argc, char **argv, const fuzz_plan *plan);

/* Bytes that a target takes from its input. */
typedef struct fuzz_script {
    const uint8_t *at;
    size_t left;
} fuzz_script;

/* Takes a byte; 0 at the end. */
uint8_t fuzz_take(fuzz_script *script);
/* Takes up to `most` changes of `size` bytes that have space for `room`; returns the new size. */
size_t fuzz_edit(fuzz_script *script, int most, uint8_t *bytes, size_t size, size_t room);
/* Ends the program unless the law holds. */
void fuzz_require(bool holds, const char *law);

#endif
