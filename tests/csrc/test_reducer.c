/* test_reducer.c - rounds against the oracle of reducer_case.h: which gradients count, when buckets
 * leave, and what a user's hook gets. Everything is compared bit for bit, on every rank, in pool
 * and in staged memory. Ranks are threads. test_reducer_abandon.c has the rounds that a rank does
 * not finish. */
#include "reducer_case.h"

/* Whatever was used by whom, in whatever order ranks arrive, each round is the oracle's. */
static void rounds_are_the_oracles(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    for (int step = 0; step < 12; ++step) {
        round_plan plan =
            step == 0 ? everyone_uses_all(self->world_size) : drawn_plan(self->world_size, step);
        if (step % self->world_size == self->rank)
            ranks_sleep_ms(2);
        one_round(self, reducer, &plan, step, "drawn");
    }
    end_reducer(self, reducer);
}

/* A rank without data takes part without contributing: its gradients count for nothing, it gets the
 * mean all the same, divided by the world or by those who contributed. */
static void a_shadow_contributes_nothing(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    for (int step = 0; step < 2 * self->world_size; ++step) {
        int shadow = step % self->world_size;
        sw_reducer_forget_steps(reducer); /* the shadow took no step of its own */
        bool active_only = step >= self->world_size;
        round_plan plan = drawn_plan(self->world_size, step + 50);
        plan.contributors &= ~(UINT32_C(1) << shadow);
        plan.divisor =
            active_only && self->world_size > 1 ? self->world_size - 1 : self->world_size;
        for (size_t p = 0; p < PARAMS; ++p)
            plan.used[p] &= plan.contributors;
        sw_reducer_divide_by_active(reducer, active_only);
        if (self->rank == shadow) {
            for (size_t p = 0; p < PARAMS; ++p)
                for (size_t i = 0; i < params[p].numel; ++i)
                    put(reducer, p, i, resting_value(self->rank, p, i));
            check(sw_reducer_open(reducer, step, false, &self->err) == SW_OK, "%s",
                  self->err.message);
            for (size_t p = 0; p < PARAMS;
                 ++p) /* what it used before, without synchronising, counts for nothing */
                mark(self, reducer, p, step);
            check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
            check(sw_reducer_shadow(reducer, &self->err) == SW_OK, "shadow: %s", self->err.message);
            check_gradients(self, reducer, &plan, step, "shadow");
        } else {
            one_round(self, reducer, &plan, step, "shadowed");
        }
    }
    end_reducer(self, reducer);
}

/* Use bits are since the last synchronisation: what a local round touched is used in the next
 * synchronised one. A local round sends nothing. */
static void local_rounds_are_remembered(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    uint64_t sent = 0;
    for (int step = 0; step < 3; ++step) {
        bool advance;
        round_plan plan = {.contributors = (UINT32_C(1) << self->world_size) - 1,
                           .divisor = self->world_size};
        plan.used[3] = UINT32_C(1)
                       << (self->world_size - 1); /* in the local round, by the last rank alone */
        plan.used[LAST] = plan.contributors;
        put_all(self, reducer, &plan, step);
        check(sw_reducer_open(reducer, step, false, &self->err) == SW_OK, "%s", self->err.message);
        if (self->rank == self->world_size - 1)
            check(sw_reducer_mark(reducer, 3, step, &advance, &self->err) == SW_OK && !advance,
                  "a local mark");
        check(sw_reducer_state(reducer) == SW_ROUND_LOCAL, "local");
        check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
        check(sw_reducer_get_stats(reducer)->buckets_sent == sent, "a local round sends nothing");
        if (open_round(self, reducer, step) && mark(self, reducer, LAST, step)) {
            check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
            check_gradients(self, reducer, &plan, step, "after a local round");
        }
        sent = sw_reducer_get_stats(reducer)->buckets_sent;
        ranks_meet(self);
    }
    end_reducer(self, reducer);
}

/* In a pool, buckets leave as they fill, in order, from the second round on; one that was marked
 * twice, or from a nested graph task, waits for the end for good, and all after it; a gradient
 * after that is an error naming the parameter. */
static void pinned_buckets_wait_for_the_end(rank_context *self)
{
    const subject *given = self->shared;
    bool pool = given->transport == SW_TRANSPORT_POOL, advance;
    sw_reducer *reducer = make_reducer(self);
    round_plan plan = everyone_uses_all(self->world_size);
    for (int step = 0; step < 2; ++step) {
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        mark(self, reducer, MIDDLE, step);
        check(!sw_reducer_is_sent(reducer, MIDDLE),
              "a bucket does not leave before those below it");
        mark(self, reducer, LAST, step);
        check(sw_reducer_is_sent(reducer, LAST) == (pool && step > 0),
              "step %d: when bucket 0 leaves", step);
        check(sw_reducer_is_placed(reducer, LAST) && !sw_reducer_is_placed(reducer, DOUBLE),
              "what was placed");
        if (pool && step > 0) { /* the second gradient: an error on every rank, and the bucket is
                                   pinned from now on */
            check(sw_reducer_mark(reducer, LAST, step, &advance, &self->err) == SW_E_STATE &&
                      strstr(self->err.message, "parameter 'param44' got a second gradient"),
                  "rank %d: %s", self->rank, self->err.message);
            check(sw_reducer_abandon(reducer, &self->err) == SW_OK, "every rank abandons: %s",
                  self->err.message);
            continue;
        }
        for (size_t p = 0; p < PARAMS; ++p)
            if (p != FROZEN && p != MIDDLE && p != LAST)
                mark(self, reducer, p, step);
        check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
        check_gradients(self, reducer, &plan, step, "two orders");
    }
    ranks_meet(self);
    uint64_t early = sw_reducer_get_stats(reducer)->buckets_early;
    for (int step = 2; step < 5; ++step) { /* LAST twice: legal where its bucket waits */
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        if (step == 2 && !pool) { /* pinned by two marks, without an error before */
            mark(self, reducer, LAST, step);
        }
        mark(self, reducer, LAST, step);
        mark(self, reducer, LAST, step);
        mark(self, reducer, MIDDLE, step);
        check(!sw_reducer_is_sent(reducer, LAST) && !sw_reducer_is_sent(reducer, MIDDLE),
              "pinned, and all after it");
        for (size_t p = 0; p < FROZEN; ++p)
            mark(self, reducer, p, step);
        mark(self, reducer, EMPTY, step);
        mark(self, reducer, DOUBLE, step);
        check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
        check_gradients(self, reducer, &plan, step, "pinned");
        ranks_meet(self);
    }
    check(sw_reducer_get_stats(reducer)->buckets_early == early,
          "nothing left early after the pin");
    end_reducer(self, reducer);
}

/* A mark by another graph task than the round's pins as well, without an error: it is legal
 * reentrant work. */
static void nested_tasks_pin(rank_context *self)
{
    const subject *given = self->shared;
    sw_reducer *reducer = make_reducer(self);
    round_plan plan = everyone_uses_all(self->world_size);
    bool advance;
    for (int step = 0; step < 4; ++step) {
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        if (step == 1) {
            check(sw_reducer_mark(reducer, LAST, 12345, &advance, &self->err) == SW_OK, "%s",
                  self->err.message);
            check(sw_reducer_advance(reducer, &self->err) == SW_OK, "%s", self->err.message);
            check(!sw_reducer_is_sent(reducer, LAST),
                  "a nested task's gradient may not be the last");
        }
        for (size_t p = PARAMS; p-- > 0;)
            if (p != FROZEN && !(step == 1 && p == LAST))
                mark(self, reducer, p, step);
        check(sw_reducer_is_sent(reducer, LAST) == false,
              "step %d: not early in the first round, pinned later", step);
        check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
        check_gradients(self, reducer, &plan, step, given->name);
        ranks_meet(self);
    }
    end_reducer(self, reducer);
}

/* Two gradients of one parameter in the first round, which sends nothing early, are legal there and
 * ever after: its bucket waits for the end. Those below it do not. */
static void two_gradients_in_the_first_round_pin(rank_context *self)
{
    const subject *given = self->shared;
    sw_reducer *reducer = make_reducer(self);
    round_plan plan = everyone_uses_all(self->world_size);
    for (int step = 0; step < 3; ++step) {
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        mark(self, reducer, LAST, step);
        check(sw_reducer_is_sent(reducer, LAST) ==
                  (step > 0 && given->transport == SW_TRANSPORT_POOL),
              "bucket 0 is early");
        mark(self, reducer, MIDDLE, step);
        mark(self, reducer, MIDDLE, step);
        check(!sw_reducer_is_sent(reducer, MIDDLE), "step %d: a parameter with two gradients waits",
              step);
        for (size_t p = 0; p < MIDDLE; ++p)
            if (p != FROZEN)
                mark(self, reducer, p, step);
        check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
        check_gradients(self, reducer, &plan, step, "two gradients");
        ranks_meet(self);
    }
    end_reducer(self, reducer);
}

/* A frozen parameter keeps its bits and is used by nobody, whatever marks say; once unfrozen on
 * every rank it is like any other. */
static void frozen_until_unfrozen(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    for (int step = 0; step < 4; ++step) {
        round_plan plan = everyone_uses_all(self->world_size);
        plan.used[FROZEN] = plan.contributors;
        if (step == 2) {
            check(!sw_reducer_takes_part(reducer, FROZEN), "frozen");
            sw_reducer_unfreeze(reducer, FROZEN);
        }
        check(sw_reducer_takes_part(reducer, FROZEN) == (step >= 2),
              "takes part since it was unfrozen");
        one_round(self, reducer, &plan, step, step < 2 ? "frozen" : "unfrozen");
        ranks_meet(self);
    }
    end_reducer(self, reducer);
}

/* For a user's hook: the use bits of all, and not one gradient touched; nothing leaves early. A
 * rank that fails instead is named there, too, and all stay in step; the others' bits of that round
 * count in the next one, since nothing has averaged what they used. */
static void use_bits_alone(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    round_plan first = everyone_uses_all(self->world_size);
    one_round(self, reducer, &first, 0, "before the hook");
    ranks_meet(self);
    sw_reducer_give_buckets(reducer, SW_BUCKETS_HOOKS);
    uint32_t unaveraged[PARAMS] = {0};
    for (int step = 1; step < 7; ++step) {
        round_plan plan = drawn_plan(self->world_size, step);
        int victim = step % 3 == 2 ? step % self->world_size : -1;
        sw_status status;
        plan.keeps = true;
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        if (self->rank == victim) {
            status = sw_reducer_abandon(reducer, &self->err);
            check(status == SW_OK, "the rank that failed: %s", self->err.message);
        } else {
            mark_used(self, reducer, &plan, step);
            check(!sw_reducer_is_sent(reducer, LAST), "nothing leaves before the end");
            status = sw_reducer_exchange_use(reducer, &self->err);
            if (victim < 0)
                check(status == SW_OK, "step %d: %s", step, self->err.message);
            else
                check_named(self, status, victim, "at the exchange");
        }
        check(sw_reducer_state(reducer) == SW_ROUND_CLOSED, "closed");
        for (size_t p = 0; p < PARAMS; ++p) {
            plan.unaveraged[p] = unaveraged[p];
            unaveraged[p] = victim < 0 ? 0 : plan.used[p] & ~(1u << victim);
        }
        if (victim < 0)
            check_gradients(self, reducer, &plan, step, "use bits alone");
    }
    ranks_meet(self);
    sw_reducer_give_buckets(reducer, SW_BUCKETS_OURS);
    one_round(self, reducer, &first, 50, "after the hook");
    end_reducer(self, reducer);
}

/* On one host a compressor's buckets are averaged at the end; of one that only copies, the means
 * are the fold's, and parameters that no rank used keep their bits. */
static void means_are_compressed(rank_context *self)
{
    const sw_compressor_settings settings = {.kind = SW_COMPRESS_PLAIN};
    sw_reducer *reducer = make_reducer(self);
    sw_compressor *compressor = NULL;
    bool at_end = false;
    check(sw_compressor_create(&settings, &compressor, &self->err) == SW_OK, "%s",
          self->err.message);
    for (size_t p = 0, number; p < PARAMS; ++p)
        check(sw_compressor_add(compressor, params[p].numel, 0, 0, &number, &self->err) == SW_OK,
              "%s", self->err.message);
    check(sw_reducer_set_compressor(reducer, compressor, &at_end, &self->err) == SW_OK && at_end,
          "%s", self->err.message);
    sw_compressor_release(compressor);
    sw_reducer_give_buckets(reducer, SW_BUCKETS_HOOKS);
    for (int step = 0; step < 4; ++step) {
        round_plan plan = drawn_plan(self->world_size, step);
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        mark_used(self, reducer, &plan, step);
        check(sw_reducer_exchange_use(reducer, &self->err) == SW_OK, "%s", self->err.message);
        for (size_t b = 0; b < sw_reducer_layout(reducer)->bucket_count; ++b) {
            size_t param =
                sw_reducer_layout(reducer)->order[sw_reducer_layout(reducer)->bucket[b].first];
            if (sw_reducer_takes_part(reducer, param))
                check(sw_reducer_compress(reducer, b, &self->err) == SW_OK, "%s",
                      self->err.message);
        }
        check_gradients(self, reducer, &plan, step, "compressed");
        check(sw_compressor_rounds(compressor) == (uint64_t)step + 1, "the round counts");
        ranks_meet(self);
    }
    end_reducer(self, reducer);
}

/* Ranks that have run another number of backwards since their last step get one sentence with both
 * counts. */
static void rounds_are_counted(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    round_plan plan = everyone_uses_all(self->world_size);
    one_round(self, reducer, &plan, 0, "counted");
    check(sw_reducer_finish(reducer, &self->err) == SW_E_STATE, "a round that is not open");
    if (self->rank != self->world_size - 1)
        sw_reducer_count_step(reducer);
    check(sw_reducer_open(reducer, 1, true, &self->err) == SW_OK, "%s", self->err.message);
    check(sw_reducer_open(reducer, 1, true, &self->err) == SW_E_STATE, "a round in a round");
    check(sw_reducer_finish(reducer, &self->err) == SW_E_MISMATCH &&
              strstr(self->err.message, "backward 1 of step") &&
              strstr(self->err.message, "backward 2 of step") &&
              strstr(self->err.message, "param44"),
          "rank %d: %s", self->rank, self->err.message);
    end_reducer(self, reducer);
}

/* What ranks have stepped with is compared in each round, without a word if it is the same; each
 * difference is told once, on every rank. Which round averaged a parameter last is known. */
static void steps_are_compared(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    round_plan all = everyone_uses_all(self->world_size), half = all;
    for (size_t p = 0; p < PARAMS; p += 2)
        half.used[p] = 0;
    one_round(self, reducer, &all, 0, "before any step");
    check(!sw_reducer_take_unlike_steps(reducer), "nothing was stepped with");
    sw_reducer_note_step(reducer, 7);
    one_round(self, reducer, &half, 1, "alike");
    check(!sw_reducer_take_unlike_steps(reducer), "all stepped with the same");
    for (size_t p = 0; p < FROZEN; ++p)
        check(sw_reducer_averaged_in(reducer, p) == (half.used[p] ? 2 : 1), "parameter %zu", p);
    sw_reducer_note_step(reducer, (uint32_t)self->rank);
    one_round(self, reducer, &half, 2, "unlike, and nobody asks");
    sw_reducer_note_step(reducer, 7);
    one_round(self, reducer, &all, 3, "unlike still");
    check(sw_reducer_take_unlike_steps(reducer) == (self->world_size > 1), "an earlier difference");
    check(!sw_reducer_take_unlike_steps(reducer), "told once");
    sw_reducer_note_step(reducer, self->rank == 0 ? 3 : 4);
    sw_reducer_note_step(reducer, self->rank == 0 ? 4 : 3);
    one_round(self, reducer, &all, 4, "alike in another order");
    check(!sw_reducer_take_unlike_steps(reducer), "the order between rounds");
    sw_reducer_note_step(reducer, (uint32_t)self->rank);
    sw_reducer_forget_steps(reducer);
    one_round(self, reducer, &all, 5, "forgotten");
    check(!sw_reducer_take_unlike_steps(reducer), "forgotten");
    end_reducer(self, reducer);
}

/* ---- trailers outlive their round ---- */

static bool nap(void *context)
{
    int *naps = context;
    if (*naps > 0) {
        --*naps;
        ranks_sleep_ms(60);
    }
    return false;
}

/* The last rank falls asleep while it waits, and wakes when its peers are in the next round and
 * have written that one's trailers: it must still read this one's. */
static void trailers_outlive_their_round(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    for (int step = 0; step < 8; ++step) {
        round_plan plan = {.contributors = (UINT32_C(1) << self->world_size) - 1,
                           .divisor = self->world_size};
        int naps = 1;
        for (size_t p = 0; p < FROZEN; ++p) /* of the last bucket, after which peers go on */
            plan.used[p] = (int)p % 8 == step ? plan.contributors : 0;
        put_all(self, reducer, &plan, step);
        if (self->rank == self->world_size - 1)
            self->comm->hooks = (sw_comm_hooks){.context = &naps, .interrupted = nap};
        else if (self->rank == 0)
            ranks_sleep_ms(25);
        if (open_round(self, reducer, step)) {
            mark_used(self, reducer, &plan, step);
            check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
            check_gradients(self, reducer, &plan, step, "trailers");
        }
        self->comm->hooks = (sw_comm_hooks){.context = NULL};
    }
    end_reducer(self, reducer);
}

int main(void)
{
    static rank_body *const laws[] = {
        rounds_are_the_oracles,
        a_shadow_contributes_nothing,
        local_rounds_are_remembered,
        pinned_buckets_wait_for_the_end,
        nested_tasks_pin,
        frozen_until_unfrozen,
        use_bits_alone,
        means_are_compressed,
        rounds_are_counted,
        steps_are_compared,
        trailers_outlive_their_round,
        two_gradients_in_the_first_round_pin,
    };
    run_laws(laws, sizeof laws / sizeof *laws);
    return check_result();
}
