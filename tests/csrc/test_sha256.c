/* test_sha256.c - the vectors of FIPS 180-4's examples and of RFC 4231, and every length around the
 * block's ends, whose digest of digests Python's hashlib has computed. */
#include <stdio.h>
#include <string.h>

#include "base/sha256.h"
#include "check.h"

static bool is_hex(const uint8_t digest[SW_SHA256_BYTES], const char *hex)
{
    char text[2 * SW_SHA256_BYTES + 1];
    for (int i = 0; i < SW_SHA256_BYTES; ++i)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return strcmp(text, hex) == 0;
}

static void test_digests(void)
{
    static const struct {
        const char *text, *digest;
    } vectors[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    uint8_t digest[SW_SHA256_BYTES];
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; ++i) {
        sw_sha256(vectors[i].text, strlen(vectors[i].text), digest);
        check(is_hex(digest, vectors[i].digest), "the digest of '%s'", vectors[i].text);
    }
}

/* python3 -c "from hashlib import sha256 as h; m = bytes(i * 7 % 251 for i in range(300)); print(
 * h(b''.join(h(m[:n]).digest() for n in range(301))).hexdigest())" */
static void test_lengths(void)
{
    uint8_t message[300], digests[301][SW_SHA256_BYTES], digest[SW_SHA256_BYTES];
    for (size_t i = 0; i < sizeof message; ++i)
        message[i] = (uint8_t)(i * 7 % 251);
    for (size_t n = 0; n <= sizeof message; ++n)
        sw_sha256(message, n, digests[n]);
    sw_sha256(digests, sizeof digests, digest);
    check(is_hex(digest, "2d12949301a5e259e37efbe6cf3bde097eb2bffeaac8887131581a62d8e5a7a1"),
          "digests of 0 to 300 bytes");
}

static void test_codes(void)
{
    uint8_t code[SW_SHA256_BYTES], key[20], data[50];
    memset(key, 0x0b, sizeof key);
    sw_hmac_sha256(key, sizeof key, "Hi There", 8, code);
    check(is_hex(code, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
          "RFC 4231, case 1");
    sw_hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, code);
    check(is_hex(code, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
          "RFC 4231, case 2");
    memset(key, 0xaa, sizeof key);
    memset(data, 0xdd, sizeof data);
    sw_hmac_sha256(key, sizeof key, data, sizeof data, code);
    check(is_hex(code, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
          "RFC 4231, case 3");
}

static void test_comparing(void)
{
    uint8_t a[SW_SHA256_BYTES] = {1}, b[SW_SHA256_BYTES] = {1};
    check(sw_sha256_equal(a, b), "equal");
    for (int i = 0; i < SW_SHA256_BYTES; ++i) {
        b[i] ^= 0x80;
        check(!sw_sha256_equal(a, b), "byte %d differs", i);
        b[i] ^= 0x80;
    }
}

int main(void)
{
    test_digests();
    test_lengths();
    test_codes();
    test_comparing();
    return check_result();
}
