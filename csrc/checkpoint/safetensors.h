/* safetensors.h - the header of a safetensors file. Written headers place data on a page boundary;
 * headers that are read are not trusted. docs/format.md defines the bytes; the format is
 * huggingface/safetensors. Thread rule: any. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/json.h"

enum { SW_SAFETENSORS_HEADER_MAX = 100000000, SW_SAFETENSORS_DIMENSIONS_MAX = 64 };

/* Return the bytes of an element of "F32" and so on; 0: unknown name. */
unsigned sw_safetensors_element_bytes(const char *dtype);

/* Compute the byte length of a tensor; SW_E_INVALID for an unknown dtype, a negative size or an
 * overflow. `name` is for the error. */
SW_MUST_USE sw_status sw_safetensors_size(const char *name, const char *dtype, const int64_t *shape,
                                          int ndim, uint64_t *size_bytes, sw_error *err);

typedef struct sw_safetensors_entry {
    const char *name, *dtype;   /* borrowed from the header */
    const sw_json_node *shape;  /* borrowed; an array of integers >= 0 */
    uint64_t begin, size_bytes; /* begin counts from the start of the file */
} sw_safetensors_entry;

typedef struct sw_safetensors {
    sw_json json;                  /* owned */
    sw_safetensors_entry *entries; /* owned; in byte order */
    size_t entry_count;
    const sw_json_node *metadata; /* borrowed from json; NULL: none */
} sw_safetensors;

/* Compute the bytes of the header from the first 8 bytes of the file. SW_E_INVALID: the header
 * would extend past the end of the file. */
SW_MUST_USE sw_status sw_safetensors_header_size(const uint8_t first[8], uint64_t file_bytes,
                                                 const char *path, size_t *header_bytes,
                                                 sw_error *err);

/* Read a header of `header_bytes` bytes, the first 8 included. SW_E_INVALID names what violates the
 * format. */
SW_MUST_USE sw_status sw_safetensors_read(const uint8_t *header, size_t header_bytes,
                                          uint64_t file_bytes, const char *path,
                                          sw_safetensors *made, sw_error *err);
void sw_safetensors_fini(sw_safetensors *safetensors);
