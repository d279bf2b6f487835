/* test_reducer_abandon.c - rounds that a rank does not finish: what was sent is folded on every
 * rank alike, nothing else is, and every other rank gets an error that names the one that failed.
 * Ranks are threads; the oracle is reducer_case.h's. */
#include "reducer_case.h"

/* A rank that fails before it has sent anything: nobody's bits change, the others are told who, the
 * next round is right. The failing rank is another one each time; at step 0 no bucket can be early,
 * later all but its own are. */
static void an_abandoned_round_folds_nothing(rank_context *self)
{
    sw_reducer *reducer = make_reducer(self);
    for (int step = 0; step < 2 * self->world_size; ++step) {
        int victim = step % self->world_size;
        round_plan plan = everyone_uses_all(self->world_size);
        plan.keeps = true;
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        sw_status status;
        if (self->rank == victim) {
            mark(self, reducer, MIDDLE, step); /* not of bucket 0: nothing is sent */
            check(!sw_reducer_is_sent(reducer, LAST) && !sw_reducer_is_sent(reducer, MIDDLE),
                  "nothing was sent");
            status = sw_reducer_abandon(reducer, &self->err);
            check(status == SW_OK, "the rank that failed has its own exception: %s",
                  self->err.message);
        } else {
            mark_used(self, reducer, &plan, step);
            status = sw_reducer_finish(reducer, &self->err);
            check_named(self, status, victim, "abandoned");
        }
        check(sw_reducer_state(reducer) == SW_ROUND_CLOSED, "the round is closed on rank %d",
              self->rank);
        for (size_t p = 0; p < PARAMS; ++p) {
            size_t wrong = 0;
            for (size_t i = 0; i < params[p].numel; ++i) {
                double own = plan.used[p] ? value_at(&params[p], self->rank, p, i, step, true)
                                          : resting_value(self->rank, p, i);
                wrong += take(reducer, p, i) != own;
            }
            check(wrong == 0, "abandoned, step %d, rank %d: %zu elements of parameter %zu changed",
                  step, self->rank, wrong, p);
        }
        ranks_meet(self); /* the next gradients are written when all have looked */
        plan.keeps = false;
        one_round(self, reducer, &plan, 100 + step, "after an abandoned round");
        ranks_meet(self);
    }
    check(sw_reducer_get_stats(reducer)->abandoned == 2, "each rank abandoned two rounds");
    end_reducer(self, reducer);
}

/* A rank that fails later: what it had sent is folded, on every rank alike, and nothing else is. */
static void what_was_sent_is_folded_everywhere(rank_context *self)
{
    const subject *given = self->shared;
    sw_reducer *reducer = make_reducer(self);
    round_plan plan = everyone_uses_all(self->world_size);
    one_round(self, reducer, &plan, 0, "before");
    put_all(self, reducer, &plan, 1);
    if (open_round(self, reducer, 1)) {
        sw_status status;
        if (self->rank == 1) {
            mark(self, reducer, LAST, 1);
            check(sw_reducer_is_sent(reducer, LAST) == (given->transport == SW_TRANSPORT_POOL),
                  "bucket 0 was sent");
            status = sw_reducer_abandon(reducer, &self->err);
            check(status == SW_OK, "%s", self->err.message);
        } else {
            mark_used(self, reducer, &plan, 1);
            status = sw_reducer_finish(reducer, &self->err);
            check_named(self, status, 1, "abandoned late");
        }
        for (size_t p = 0; p < PARAMS; ++p) {
            bool folded = p == LAST && given->transport == SW_TRANSPORT_POOL;
            size_t wrong = 0;
            for (size_t i = 0; i < params[p].numel; ++i) {
                double own = plan.used[p] ? value_at(&params[p], self->rank, p, i, 1, true)
                                          : resting_value(self->rank, p, i);
                wrong += take(reducer, p, i) !=
                         (folded ? expected_at(&plan, self->world_size, p, i, 1) : own);
            }
            check(wrong == 0, "abandoned late, rank %d: %zu elements of parameter %zu are wrong",
                  self->rank, wrong, p);
        }
    }
    end_reducer(self, reducer);
}

/* Peers of a rank whose backward failed are told while it does nothing more, if they come in time;
 * else the round stays open until it is abandoned for good. */
static void a_failed_backward_is_told_in_time(rank_context *self)
{
    const subject *given = self->shared;
    bool pool = given->transport == SW_TRANSPORT_POOL, fails = self->rank == self->world_size - 1;
    sw_reducer *reducer = make_reducer(self);
    round_plan plan = everyone_uses_all(self->world_size);
    for (int step = 0; step < 6; ++step) {
        bool failing = step == 1 || step == 3, late = step == 3;
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        if (!failing) {
            mark_used(self, reducer, &plan, step);
            check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
            check_gradients(self, reducer, &plan, step, "clean");
        } else if (fails) {
            mark(self, reducer, LAST, step);
            int64_t budget_ns = late ? 0 : INT64_C(20000000000);
            check(sw_reducer_try_abandon(reducer, budget_ns, &self->err) == SW_OK, "%s",
                  self->err.message);
            check((sw_reducer_state(reducer) == SW_ROUND_CLOSED) == (pool && !late),
                  "step %d: whether the round is over", step);
            if (late)
                ranks_meet(self);
            check(sw_reducer_abandon(reducer, &self->err) == SW_OK, "%s", self->err.message);
        } else {
            if (late)
                ranks_meet(self); /* until the other has given up waiting */
            mark_used(self, reducer, &plan, step);
            check(sw_reducer_finish(reducer, &self->err) == SW_E_MISMATCH &&
                      strstr(self->err.message, "left a backward unfinished"),
                  "rank %d: %s", self->rank, self->err.message);
        }
        ranks_meet(self);
    }
    end_reducer(self, reducer);
}

/* A model that is dropped with buckets posted takes its part of them along: peers are told. */
static void what_is_dropped_in_the_middle_is_named(rank_context *self)
{
    const subject *given = self->shared;
    if (given->transport != SW_TRANSPORT_POOL)
        return; /* nothing is posted before the end */
    sw_reducer *reducer = make_reducer(self);
    sw_gradient_memory *memory = NULL;
    round_plan plan = everyone_uses_all(self->world_size);
    for (int step = 0; step < 2; ++step) {
        put_all(self, reducer, &plan, step);
        if (!open_round(self, reducer, step))
            break;
        if (step == 0) {
            mark_used(self, reducer, &plan, step);
            check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s", self->err.message);
        } else if (self->rank == 1) {
            mark(self, reducer, MIDDLE, step);
            mark(self, reducer, LAST, step);
            check(sw_reducer_is_sent(reducer, LAST), "bucket 0 has left");
            memory = sw_reducer_take_memory(reducer);
            sw_reducer_destroy(reducer);
        } else {
            mark_used(self, reducer, &plan, step);
            check(sw_reducer_finish(reducer, &self->err) == SW_E_COMM &&
                      strstr(self->err.message, "was dropped in the middle of a backward"),
                  "rank %d: %s", self->rank, self->err.message);
        }
    }
    ranks_meet(self);
    if (self->rank == 1)
        sw_gradient_memory_destroy(memory);
    else
        sw_reducer_destroy(reducer);
}

int main(void)
{
    static rank_body *const laws[] = {
        an_abandoned_round_folds_nothing,
        what_was_sent_is_folded_everywhere,
        a_failed_backward_is_told_in_time,
        what_is_dropped_in_the_middle_is_named,
    };
    run_laws(laws, sizeof laws / sizeof *laws);
    return check_result();
}
