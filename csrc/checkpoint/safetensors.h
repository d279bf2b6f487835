/* safetensors.h - the header of a safetensors file: written with data on a page boundary, read with
 * suspicion. The bytes are in docs/format.md; the format is huggingface/safetensors. Thread rule:
 * any. */
#ifndef SW_CHECKPOINT_SAFETENSORS_H
#define SW_CHECKPOINT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/json.h"

enum { SW_SAFETENSORS_HEADER_MAX = 100000000, SW_SAFETENSORS_DIMENSIONS_MAX = 64 };

/* Bytes of an element of "F32" and so on; 0 for a name that is none. */
unsigned sw_safetensors_element_bytes(const char *dtype);

/* Byte length of a tensor; SW_E_INVALID for an unknown dtype, a negative size or an overflow.
 * `name` is for the error. */
SW_MUST_USE sw_status sw_safetensors_size(const char *name, const char *dtype, const int64_t *shape,
                                          int ndim, uint64_t *size_bytes, sw_error *err);

typedef struct sw_safetensors_entry {
    const char *name, *dtype;   /* borrowed from the header */
    const sw_json_node *shape;  /* borrowed; an array of integers >= 0 */
    uint64_t begin, size_bytes; /* begin is from the start of the file */
} sw_safetensors_entry;

typedef struct sw_safetensors {
    sw_json json;                  /* owned */
    sw_safetensors_entry *entries; /* owned; in the order of their bytes */
    size_t entry_count;
    const sw_json_node *metadata; /* borrowed from json; NULL: none */
} sw_safetensors;

/* How many bytes of the file the header takes, from its first 8 bytes. SW_E_INVALID when that
 * leaves the file. */
SW_MUST_USE sw_status sw_safetensors_header_size(const uint8_t first[8], uint64_t file_bytes,
                                                 const char *path, size_t *header_bytes,
                                                 sw_error *err);

/* Reads `header_bytes` bytes of header, the first 8 included. SW_E_INVALID names what violates the
 * format. */
SW_MUST_USE sw_status sw_safetensors_read(const uint8_t *header, size_t header_bytes,
                                          uint64_t file_bytes, const char *path,
                                          sw_safetensors *made, sw_error *err);
void sw_safetensors_fini(sw_safetensors *safetensors);

#endif
