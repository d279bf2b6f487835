/* json.c - a recursive reader over untrusted bytes, and a text that grows. */
#include "checkpoint/json.h"

#include <errno.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"

enum { DEPTH_MAX = 64, NUMBER_BYTES = 64, FREE_VALUES = 65536, VALUE_BYTES = 4 };

typedef struct reader {
    const char *start, *at, *end;
    size_t most_values;
    char *string_at; /* decoded strings: never longer than their source */
    const char *label;
    sw_json *json;
    sw_error *err;
} reader;

static sw_status wrong(const reader *r, const char *what)
{
    return sw_error_set(r->err, SW_E_INVALID, -1, "%.300s: byte %zu: %s", r->label,
                        (size_t)(r->at - r->start), what);
}

static void skip_space(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r'))
        r->at++;
}

static bool take(reader *r, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length) != 0)
        return false;
    r->at += length;
    return true;
}

static sw_status add_node(reader *r, size_t *index)
{
    sw_json *json = r->json;
    if (json->node_count >= r->most_values ||
        json->node_count >= FREE_VALUES + (size_t)(r->at - r->start) / VALUE_BYTES)
        return wrong(r, "too many values");
    sw_json_node *nodes =
        sw_grown(json->nodes, &json->node_capacity, json->node_count, sizeof *nodes, 64);
    if (!nodes)
        SW_FAIL(r->err, SW_E_MEMORY, "%s: no memory for %zu JSON values", r->label,
                json->node_count + 1);
    json->nodes = nodes;
    *index = json->node_count++;
    json->nodes[*index] = (sw_json_node){.span = 1};
    return SW_OK;
}

static bool read_hex4(reader *r, uint32_t *value)
{
    uint32_t result = 0;
    if (r->end - r->at < 4)
        return false;
    for (int i = 0; i < 4; ++i) {
        char c = *r->at++;
        uint32_t digit;
        if (c >= '0' && c <= '9')
            digit = (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            digit = (uint32_t)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F')
            digit = (uint32_t)(c - 'A' + 10);
        else
            return false;
        result = result << 4 | digit;
    }
    *value = result;
    return true;
}

static void put_utf8(reader *r, uint32_t code)
{
    if (code < 0x80) {
        *r->string_at++ = (char)code;
    } else if (code < 0x800) {
        *r->string_at++ = (char)(0xc0 | code >> 6);
        *r->string_at++ = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
        *r->string_at++ = (char)(0xe0 | code >> 12);
        *r->string_at++ = (char)(0x80 | (code >> 6 & 63));
        *r->string_at++ = (char)(0x80 | (code & 63));
    } else {
        *r->string_at++ = (char)(0xf0 | code >> 18);
        *r->string_at++ = (char)(0x80 | (code >> 12 & 63));
        *r->string_at++ = (char)(0x80 | (code >> 6 & 63));
        *r->string_at++ = (char)(0x80 | (code & 63));
    }
}

static sw_status read_unicode_escape(reader *r)
{
    uint32_t code, low;
    if (!read_hex4(r, &code))
        return wrong(r, "\\u needs four hex digits");
    if (code >= 0xd800 && code < 0xdc00) {
        if (!take(r, "\\u") || !read_hex4(r, &low) || low < 0xdc00 || low > 0xdfff)
            return wrong(r, "half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
        return wrong(r, "half of a surrogate pair");
    }
    if (code == 0)
        return wrong(r, "a zero character in a string");
    put_utf8(r, code);
    return SW_OK;
}

static sw_status read_escape(reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (r->at == r->end)
        return wrong(r, "the text ends inside a string");
    char c = *r->at++;
    if (c == 'u')
        return read_unicode_escape(r);
    const char *found = c ? strchr(from, c) : NULL;
    if (!found)
        return wrong(r, "an unknown escape in a string");
    *r->string_at++ = to[found - from];
    return SW_OK;
}

/* Read a character of two to four bytes: shortest form, no surrogate, at most U+10FFFF. */
static sw_status read_wide(reader *r)
{
    const uint8_t *at = (const uint8_t *)r->at;
    size_t left = (size_t)(r->end - r->at);
    size_t length = at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : 2;
    uint32_t code = at[0] & (0xffu >> (length + 1));
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (at[0] < 0xc2 || at[0] > 0xf4 || left < length)
        return wrong(r, "broken UTF-8");
    for (size_t i = 1; i < length; ++i) {
        if ((at[i] & 0xc0) != 0x80)
            return wrong(r, "broken UTF-8");
        code = code << 6 | (at[i] & 63);
    }
    if (code < least[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return wrong(r, "broken UTF-8");
    memcpy(r->string_at, at, length);
    r->string_at += length;
    r->at += length;
    return SW_OK;
}

static sw_status read_string(reader *r, const char **text)
{
    *text = r->string_at;
    if (!take(r, "\""))
        return wrong(r, "a string was expected");
    while (r->at < r->end && *r->at != '"') {
        uint8_t c = (uint8_t)*r->at;
        if (c < 0x20)
            return wrong(r, "a control character in a string");
        if (c == '\\') {
            r->at++;
            SW_TRY(read_escape(r));
        } else if (c < 0x80) {
            *r->string_at++ = *r->at++;
        } else {
            SW_TRY(read_wide(r));
        }
    }
    if (!take(r, "\""))
        return wrong(r, "the text ends inside a string");
    *r->string_at++ = '\0'; /* fits: quotes need no room in the buffer */
    return SW_OK;
}

static size_t count_digits(reader *r)
{
    const char *begin = r->at;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9')
        r->at++;
    return (size_t)(r->at - begin);
}

/* printf and strtod follow the process's locale, whose decimal point may be a comma. Switch this
 * thread to the plain locale until the matching call. 0: no memory. */
static locale_t enter_plain_locale(locale_t *made)
{
    *made = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    return *made ? uselocale(*made) : (locale_t)0;
}

static void leave_plain_locale(locale_t before, locale_t made)
{
    if (!made)
        return;
    uselocale(before);
    freelocale(made);
}

static double read_decimal(const char *text)
{
    locale_t made, before = enter_plain_locale(&made);
    double value = strtod(text, NULL);
    leave_plain_locale(before, made);
    return value;
}

static sw_status read_number(reader *r, sw_json_node *node)
{
    char copy[NUMBER_BYTES];
    const char *begin = r->at;
    bool is_integer = true;
    (void)take(r, "-");
    const char *digits = r->at;
    size_t count = count_digits(r);
    if (count == 0 || (count > 1 && *digits == '0'))
        return wrong(r, "a value was expected");
    if (take(r, ".")) {
        is_integer = false;
        if (count_digits(r) == 0)
            return wrong(r, "a digit was expected after the point");
    }
    if (take(r, "e") || take(r, "E")) {
        is_integer = false;
        (void)(take(r, "+") || take(r, "-"));
        if (count_digits(r) == 0)
            return wrong(r, "a digit was expected in the exponent");
    }
    size_t length = (size_t)(r->at - begin);
    if (length >= sizeof copy) /* legal, but not read by value */
        length = sizeof copy - 1, is_integer = false;
    memcpy(copy, begin, length);
    copy[length] = '\0';
    errno = 0;
    long long integer = is_integer ? strtoll(copy, NULL, 10) : 0;
    is_integer = is_integer && errno == 0;
    node->kind = is_integer ? SW_JSON_INTEGER : SW_JSON_NUMBER;
    if (is_integer)
        node->integer = integer;
    else
        node->number = read_decimal(copy);
    return SW_OK;
}

static sw_status read_value(reader *r, int depth, const char *key);

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static sw_status check_keys(reader *r, size_t index)
{
    const sw_json_node *object = &r->json->nodes[index];
    size_t count = object->count;
    if (count < 2)
        return SW_OK;
    const char **keys = malloc(count * sizeof *keys);
    if (!keys)
        SW_FAIL(r->err, SW_E_MEMORY, "%s: no memory for %zu keys", r->label, count);
    const sw_json_node *member = sw_json_first(object);
    for (size_t i = 0; i < count; ++i, member = sw_json_next(member))
        keys[i] = member->key;
    qsort(keys, count, sizeof *keys, compare_keys);
    sw_status status = SW_OK;
    for (size_t i = 1; i < count && status == SW_OK; ++i)
        if (strcmp(keys[i - 1], keys[i]) == 0)
            status = sw_error_set(r->err, SW_E_INVALID, -1,
                                  "%.300s: the key '%.150s' appears twice", r->label, keys[i]);
    free(keys);
    return status;
}

static sw_status read_members(reader *r, int depth, size_t index, char closing)
{
    bool is_object = closing == '}';
    r->at++;
    skip_space(r);
    while (r->at == r->end || *r->at != closing) {
        const char *key = NULL;
        if (r->json->nodes[index].count > 0) {
            if (!take(r, ","))
                return wrong(r, is_object ? "',' or '}' was expected" : "',' or ']' was expected");
            skip_space(r);
        }
        if (is_object) {
            SW_TRY(read_string(r, &key));
            skip_space(r);
            if (!take(r, ":"))
                return wrong(r, "':' was expected");
        }
        SW_TRY(read_value(r, depth + 1, key));
        r->json->nodes[index].count++;
        skip_space(r);
    }
    r->at++;
    r->json->nodes[index].span = (uint32_t)(r->json->node_count - index);
    return is_object ? check_keys(r, index) : SW_OK;
}

static sw_status read_value(reader *r, int depth, const char *key)
{
    size_t index = 0;
    if (depth > DEPTH_MAX)
        return wrong(r, "nested too deeply");
    SW_TRY(add_node(r, &index));
    sw_json_node *node = &r->json->nodes[index];
    node->key = key;
    skip_space(r);
    if (r->at == r->end)
        return wrong(r, "the text ends where a value was expected");
    switch (*r->at) {
    case '{':
        node->kind = SW_JSON_OBJECT;
        return read_members(r, depth, index, '}');
    case '[':
        node->kind = SW_JSON_ARRAY;
        return read_members(r, depth, index, ']');
    case '"':
        node->kind = SW_JSON_STRING;
        return read_string(r, &node->text);
    default:
        break;
    }
    if (take(r, "null"))
        return SW_OK;
    if ((node->integer = take(r, "true")) || take(r, "false")) {
        node->kind = SW_JSON_BOOL;
        return SW_OK;
    }
    return read_number(r, node);
}

sw_status sw_json_parse(const char *text, size_t size_bytes, size_t most_values, const char *label,
                        sw_json *json, sw_error *err)
{
    sw_json made = {.strings = malloc(size_bytes + 1)};
    reader r = {.start = text,
                .at = text,
                .end = text + size_bytes,
                .most_values = most_values < UINT32_MAX ? most_values : UINT32_MAX,
                .string_at = made.strings,
                .label = label,
                .json = &made,
                .err = err};
    if (!made.strings)
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for %zu bytes of JSON", label, size_bytes);
    sw_status status = read_value(&r, 0, NULL);
    skip_space(&r);
    if (status == SW_OK && r.at != r.end)
        status = wrong(&r, "bytes after the value");
    if (status == SW_OK)
        *json = made;
    else
        sw_json_fini(&made);
    return status;
}

void sw_json_fini(sw_json *json)
{
    free(json->nodes);
    free(json->strings);
    *json = (sw_json){0};
}

const sw_json_node *sw_json_find(const sw_json_node *object, const char *key)
{
    if (!object || object->kind != SW_JSON_OBJECT)
        return NULL;
    const sw_json_node *member = sw_json_first(object);
    for (size_t i = 0; i < object->count; ++i, member = sw_json_next(member))
        if (strcmp(member->key, key) == 0)
            return member;
    return NULL;
}

bool sw_text_reserve(sw_text *text, size_t more)
{
    size_t need;
    if (text->is_out_of_memory || !sw_size_add(text->size_bytes, more, &need) ||
        !sw_size_add(need, 1, &need)) {
        text->is_out_of_memory = true;
        return false;
    }
    if (need > text->capacity) {
        size_t capacity = sw_size_max(need, 2 * text->capacity);
        char *grown = realloc(text->data, capacity);
        text->is_out_of_memory = !grown;
        if (!grown)
            return false;
        text->data = grown;
        text->capacity = capacity;
    }
    return true;
}

void sw_text_append(sw_text *text, const char *bytes, size_t size_bytes)
{
    if (!sw_text_reserve(text, size_bytes))
        return;
    memcpy(text->data + text->size_bytes, bytes, size_bytes);
    text->size_bytes += size_bytes;
    text->data[text->size_bytes] = '\0';
}

void sw_text_print(sw_text *text, const char *format, ...)
{
    va_list arguments;
    char small[256];
    va_start(arguments, format);
    int length = vsnprintf(small, sizeof small, format, arguments);
    va_end(arguments);
    if (length >= 0 && (size_t)length < sizeof small) {
        sw_text_append(text, small, (size_t)length);
    } else if (length >= 0 && sw_text_reserve(text, (size_t)length)) {
        va_start(arguments, format);
        vsnprintf(text->data + text->size_bytes, (size_t)length + 1, format, arguments);
        va_end(arguments);
        text->size_bytes += (size_t)length;
    }
}

void sw_text_number(sw_text *text, double value)
{
    locale_t made, before = enter_plain_locale(&made);
    sw_text_print(text, "%.17g", value);
    leave_plain_locale(before, made);
}

void sw_text_quote(sw_text *text, const char *value)
{
    sw_text_append(text, "\"", 1);
    for (const char *at = value; *at; ++at) {
        if (*at == '"' || *at == '\\')
            sw_text_print(text, "\\%c", *at);
        else if ((uint8_t)*at < 0x20)
            sw_text_print(text, "\\u%04x", (unsigned)(uint8_t)*at);
        else
            sw_text_append(text, at, 1);
    }
    sw_text_append(text, "\"", 1);
}

sw_status sw_text_check(const sw_text *text, const char *label, sw_error *err)
{
    if (text->is_out_of_memory || !text->data)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the text of %s after %zu bytes", label,
                text->size_bytes);
    return SW_OK;
}

void sw_text_fini(sw_text *text)
{
    free(text->data);
    *text = (sw_text){0};
}
