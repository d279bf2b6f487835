/* json.h - a strict JSON reader and a compact writer, for manifests and safetensors headers, which
 * are untrusted.
 *
 * Idea: a document is one array of nodes in reading order. A node counts the nodes of its value, so
 * the next sibling is `node + node->span` and no links are needed. Strings are decoded into one
 * buffer and end with a zero byte. The reader rejects a zero byte inside a string, duplicate keys,
 * depth beyond 64, bytes after the value, and invalid UTF-8.
 *
 * Thread rule: owner only. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum sw_json_kind {
    SW_JSON_NULL = 0,
    SW_JSON_BOOL,
    SW_JSON_INTEGER, /* fits int64_t */
    SW_JSON_NUMBER,
    SW_JSON_STRING,
    SW_JSON_ARRAY,
    SW_JSON_OBJECT,
} sw_json_kind;

typedef struct sw_json_node {
    sw_json_kind kind;
    uint32_t span;   /* nodes of this value, itself included */
    uint32_t count;  /* elements or members */
    const char *key; /* member name; borrowed from the document */
    union {
        const char *text; /* of a string; borrowed from the document */
        int64_t integer;  /* of an integer; 0 or 1 for a bool */
        double number;    /* of another number */
    };
} sw_json_node;

typedef struct sw_json {
    sw_json_node *nodes; /* owned; nodes[0] is the document */
    size_t node_count, node_capacity;
    char *strings; /* owned */
} sw_json;

/* Parse a text. SW_E_INVALID states the fault and its byte offset; `label` names the document in
 * errors. On success, fini it.
 *
 * A node takes 32 bytes, and the text of a value as few as two ("0,"). So a limit keeps nodes below
 * about 8 times the text: its first n bytes may have at most 65,536 + n / 4 values. All of it may
 * have at most `most_values`. */
SW_MUST_USE sw_status sw_json_parse(const char *text, size_t size_bytes, size_t most_values,
                                    const char *label, sw_json *json, sw_error *err);
void sw_json_fini(sw_json *json);

/* Return the first child, valid if count > 0; and the sibling after `node`. */
static inline const sw_json_node *sw_json_first(const sw_json_node *node)
{
    return node + 1;
}

static inline const sw_json_node *sw_json_next(const sw_json_node *node)
{
    return node + node->span;
}

/* Return the value of an integer or another number. */
static inline double sw_json_number(const sw_json_node *node)
{
    return node->kind == SW_JSON_INTEGER ? (double)node->integer : node->number;
}

/* Return the member `key` of an object; NULL: no such member, or `object` is not an object. */
const sw_json_node *sw_json_find(const sw_json_node *object, const char *key);

/* A growing text. A failed allocation is recorded: check once, at the end. */
typedef struct sw_text {
    char *data; /* owned, ends with a zero byte when not NULL */
    size_t size_bytes, capacity;
    bool is_out_of_memory;
} sw_text;

/* Reserve `more` bytes and a zero byte after the text; false: no memory. */
bool sw_text_reserve(sw_text *text, size_t more);
void sw_text_append(sw_text *text, const char *bytes, size_t size_bytes);
void sw_text_print(sw_text *text, const char *format, ...) SW_PRINTF(2, 3);
/* Append a finite number with full precision. The decimal separator is a point in every locale. */
void sw_text_number(sw_text *text, double value);
/* Append `value` in quotes, escaped. */
void sw_text_quote(sw_text *text, const char *value);
SW_MUST_USE sw_status sw_text_check(const sw_text *text, const char *label, sw_error *err);
void sw_text_fini(sw_text *text);
