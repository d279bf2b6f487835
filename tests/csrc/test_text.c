/* test_text.c - messages that are cut, at the end or inside, hold whole characters alone. */
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/text.h"
#include "check.h"

static void check_mended(const char *cut, const char *wanted)
{
    char text[64];
    snprintf(text, sizeof text, "%s", cut);
    sw_text_mend(text);
    check(strcmp(text, wanted) == 0, "'%s' became '%s'", wanted, text);
}

static void test_cuts(void)
{
    check_mended("", "");
    check_mended("plain", "plain");
    check_mended("\xc3\xa9\xe6\xa4\x9c\xf0\x9d\x84\x9e", "\xc3\xa9\xe6\xa4\x9c\xf0\x9d\x84\x9e");
    check_mended("a\xc3", "a");
    check_mended("a\xe6\xa4", "a");
    check_mended("a\xf0\x9d\x84", "a");
    check_mended("'a\xe6\xa4' is missing", "'a?' is missing");
    check_mended("'caf\xe9.bin'", "'caf?.bin'");
    check_mended("\x80\xbf", "\x80\xbf"); /* no character begins here, so none was cut */
}

static bool is_whole(const char *text)
{
    for (size_t present; *text; text += present)
        if (sw_text_character(text, &present) != present)
            return false;
    return true;
}

static void test_messages(void)
{
    static const char *const letters[] = {"\xc3\xa9", "\xe6\xa4\x9c", "\xf0\x9d\x84\x9e"};
    for (size_t kind = 0; kind < 3; ++kind)
        for (size_t before = 0; before < 4; ++before) {
            sw_error err;
            char name[1024] = "xxxx";
            for (size_t at = before; at + 8 < sizeof name; at += strlen(letters[kind]))
                snprintf(name + at, sizeof name - at, "%s", letters[kind]);
            sw_error_set(&err, SW_E_OS, 0, "'%.300s' or '%.80s': %s", name, name, name);
            check(is_whole(err.message) && strlen(err.message) > SW_ERROR_MESSAGE_BYTES - 8,
                  "a message of letters of %zu bytes: %s", kind + 2, err.message);
        }
}

int main(void)
{
    test_cuts();
    test_messages();
    return check_result();
}
