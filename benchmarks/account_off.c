/* account_off.c - account.c without what it does, for the arm of bench_account that has no account.
 *
 * Rows and collectives are not kept; a sleep still returns its length, which the communicator's
 * statistics count. */
#include "comm/account.h"
#include "platform/clock.h"

static sw_account none;

const sw_account *sw_account_get(void)
{
    return &none;
}

sw_status sw_account_open(const char *path, int rank, int world_size, const char *host,
                          sw_error *err)
{
    (void)path, (void)rank, (void)world_size, (void)host;
    return sw_error_set(err, SW_E_OS, 2, "there is no account");
}

void sw_account_forget(void) {}
void sw_account_enter(sw_phase phase)
{
    (void)phase;
}
void sw_account_stepping(void) {}
uint64_t sw_account_stepped(void)
{
    return 0;
}
void sw_account_call(const char *name, bool saves)
{
    (void)name, (void)saves;
}
void sw_account_call_end(void) {}
void sw_account_fail(const char *sentence)
{
    (void)sentence;
}
bool sw_account_end(void)
{
    return true;
}
void sw_account_set_stack_signal(int number)
{
    (void)number;
}
int sw_account_met(const sw_account_group *group, bool leads)
{
    (void)group, (void)leads;
    return 0;
}
void sw_account_restarted(int64_t first_unix_ns, int64_t kept_unix_ns, int64_t lost_ns,
                          uint64_t restarts)
{
    (void)first_unix_ns, (void)kept_unix_ns, (void)lost_ns, (void)restarts;
}
uint64_t sw_account_begin(const sw_account_use *use, uint32_t kind, const char *label,
                          uint64_t size_bytes, uint32_t step, uint32_t round)
{
    (void)use, (void)kind, (void)label, (void)size_bytes, (void)step, (void)round;
    return 0;
}
void sw_account_moved(sw_link link, uint64_t size_bytes)
{
    (void)link, (void)size_bytes;
}
void sw_account_post(uint64_t serial)
{
    (void)serial;
}
void sw_account_done(uint64_t serial)
{
    (void)serial;
}
int64_t sw_account_slept(int64_t begun_ns, int rank, int group)
{
    (void)rank, (void)group;
    return sw_clock_now_ns() - begun_ns;
}
