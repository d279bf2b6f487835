"""Laws of `shardwright plan --simulate`: cases whose time a formula gives, failures against their expectation, and a sentence
with exit code 2 for input that no ranks can have. benchmarks/bench_simulate.py compares with measured steps.
"""

import dataclasses
import json
import math
import time

import pytest
from shardwright_tools.cli import main
from shardwright_tools.planner.calibration import Link, Rates, rates_of
from shardwright_tools.planner.choose import Work
from shardwright_tools.planner.costs import Run, ring, tree_latency
from shardwright_tools.planner.events import Clock, Group, Shared, sleep, start
from shardwright_tools.planner.failures import daly, goodput, recover, times_between, young
from shardwright_tools.planner.machine import Machine
from shardwright_tools.planner.shape import PlanError, from_numbers
from shardwright_tools.planner.simulate import schedule, simulate

MODEL = from_numbers(layers=4, width=256, vocabulary=256)
FORWARD, BACKWARD, OPTIMIZER = 0.1, 0.2, 0.05
INSIDE, BETWEEN = Link(10.0, 100.0), Link(50.0, 50.0)
WORK = Work(micro_batch=1, sequence=128, precision="fp32")
WHOLE = 1 << 60


def gpus(hosts, ranks):
    return Machine(hosts, ranks, 1 << 40, INSIDE.bandwidth, BETWEEN.bandwidth, True, "h100", 989.0)


def rates(**changes):
    """Return rates at which memory takes no time, with compute of 0.35 s a step."""
    made = Rates(INSIDE, BETWEEN, 1e9, None, (FORWARD, BACKWARD, OPTIMIZER))
    return dataclasses.replace(made, **changes)


def step(machine, run, found=None, work=WORK, model=MODEL):
    return simulate(model, machine, work, run, found or rates())


# the clock, resources, groups ------------------------------------------------------------------------------------------


def test_users_of_a_shared_resource_divide_it_evenly():
    clock, ends = Clock(), {}
    cores = Shared(clock, 2.0)

    def user(name, seconds, weight, begin):
        yield sleep(clock, begin)
        yield cores.use(seconds, weight)
        ends[name] = clock.now

    start(clock, user("one", 1.0, 1.0, 0.0))  # alone until 0.5, then a third of a load of 4 on 2 cores: half speed
    start(clock, user("three", 1.0, 3.0, 0.5))
    clock.run()
    assert ends["one"] == pytest.approx(0.5 + 0.5 / 0.5)
    assert ends["three"] == pytest.approx(1.5 + (1.0 - 0.5) / (2 / 3))


def test_what_holds_a_part_of_a_resource_slows_its_users_until_it_lets_go():
    clock, ends = Clock(), []
    cores = Shared(clock, 1.0)

    def user():
        yield cores.use(1.0)
        ends.append(clock.now)

    cores.hold(1.0)
    clock.after(0.5, lambda: cores.hold(-1.0))
    start(clock, user())
    clock.run()
    assert ends == [pytest.approx(0.5 + 0.75)]


def test_a_collective_begins_when_the_last_rank_has_come_and_the_one_before_has_ended():
    clock, ends = Clock(), []
    group = Group(clock, 2, Shared(clock, 1.0))

    def member(begin):
        yield sleep(clock, begin)
        first, second = group.post(0, 0.1, 1.0), group.post(1, 0.1, 2.0)
        yield first
        ends.append(clock.now)
        yield second
        ends.append(clock.now)

    start(clock, member(0.0))
    start(clock, member(3.0))
    clock.run()
    assert ends == pytest.approx([4.1, 4.1, 6.2, 6.2])


# a step against formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_mean_that_nothing_hides_adds_the_time_of_a_ring(ranks):
    size = MODEL.numel * 4
    expected = 2 * (ranks - 1) * (INSIDE.latency_us * 1e-6 + size / ranks / (INSIDE.bandwidth * 1e9))
    made = step(gpus(1, ranks), Run(0, cap_bytes=WHOLE))
    assert made.step_s == pytest.approx(FORWARD + BACKWARD + OPTIMIZER + expected, rel=1e-6)
    assert sum(made.seconds.values()) == pytest.approx(made.step_s)
    assert made.seconds.get("communication", 0.0) == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_a_ring_over_hosts_has_the_network_s_rate_and_hops_of_both_kinds():
    latency, transfer = ring(8e9, 8, 4, INSIDE, BETWEEN)
    assert latency == pytest.approx((6 * 10 + 1 * 50) * 1e-6)
    assert transfer == pytest.approx(7 / 8 * 8e9 / 50e9)
    assert ring(8e9, 2, 1, INSIDE, BETWEEN, part=0.25) == pytest.approx((50e-6, 0.5 * 8e9 / 12.5e9))
    assert tree_latency(1024, 8, INSIDE, BETWEEN) == pytest.approx(2 * (7 * 10 + 7 * 50) * 1e-6)


def test_means_that_are_faster_than_the_backward_leave_only_the_last_bucket():
    fast = rates(inside=Link(0.0, 1e6))
    made = step(gpus(1, 4), Run(0, cap_bytes=1 << 20), fast)
    assert made.step_s == pytest.approx(FORWARD + BACKWARD + OPTIMIZER, rel=1e-3)
    assert made.seconds.get("communication", 0.0) < 1e-4


def test_means_that_are_slower_than_the_backward_take_the_time_of_the_link():
    slow = rates(inside=Link(0.0, 1e-3))
    made = step(gpus(1, 2), Run(0, cap_bytes=1 << 20), slow)
    wire = MODEL.numel * 4 / 1e6
    assert FORWARD + wire < made.step_s < FORWARD + wire + BACKWARD + OPTIMIZER + 0.01
    assert made.link_busy == pytest.approx(wire / made.step_s, rel=1e-3)


@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_straggler_holds_every_rank_for_what_it_takes_longer(factor, ranks):
    fast = rates(inside=Link(0.0, 1e9))
    made = step(gpus(1, ranks), Run(0, stragglers={1: factor}), fast)
    assert made.step_s == pytest.approx(factor * (FORWARD + BACKWARD + OPTIMIZER), rel=1e-6)
    waits = (factor - 1) * (FORWARD + BACKWARD + OPTIMIZER) * (ranks - 1) / ranks
    assert made.seconds.get("communication", 0.0) == pytest.approx(waits, rel=1e-4, abs=1e-6)
    assert made.classes == (2 if factor > 1 else 1)


def test_gathers_without_prefetch_add_up_and_with_it_hide_behind_computing():
    """zero=3: of N parameters all but the outermost unit are gathered twice, less the unit that runs twice in a row."""
    found = rates(inside=Link(0.0, 10.0))
    layer = MODEL.units[1].numel * 4 / 2 / 10e9
    outer = MODEL.units[0].numel * 4 / 2 / 10e9
    exposed = step(gpus(1, 2), Run(3, prefetch=0), found)
    hidden = step(gpus(1, 2), Run(3, prefetch=1), found)
    gathers = outer + (2 * 4 - 1) * layer
    means = exposed.step_s - FORWARD - BACKWARD - OPTIMIZER / 2 - gathers
    assert outer <= means <= outer + 4 * layer  # beside gathers, with which they share the link; the last one is alone
    assert hidden.step_s <= FORWARD + BACKWARD + OPTIMIZER / 2 + 2 * outer + 2 * layer + 1e-4
    assert step(gpus(1, 2), Run(3, prefetch=8), found).step_s <= hidden.step_s * 1.001


def test_slices_that_are_gathered_after_a_step_hide_behind_the_next_forward():
    fast, none = (step(gpus(1, 4), Run(2, prefetch=prefetch), rates(inside=Link(0.0, 1.0))) for prefetch in (1, 0))
    gathered = 3 / 4 * MODEL.numel * 4 / 1e9
    assert 0.5 * gathered < none.step_s - fast.step_s <= gathered
    half = dataclasses.replace(WORK, precision="bf16")  # casts read every parameter before the first unit runs
    made = [
        step(gpus(1, 4), Run(2, prefetch=prefetch), rates(inside=Link(0.0, 1.0)), half).step_s for prefetch in (1, 0)
    ]
    assert made[0] == pytest.approx(made[1])


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 4), (4, 16)])
def test_a_pipeline_idles_for_its_bubble(stages, micro_batches):
    """Of equal stages (P - 1) / (M + P - 1) of the time, P the stages and M the micro-batches; interleaved 1 / chunks of it."""
    model = dataclasses.replace(from_numbers(layers=8, width=256, vocabulary=256), has_head=False)
    found = rates(inside=Link(0.0, 1e9), between=Link(0.0, 1e9), compute=(0.1, 0.2, 1e-9))
    work = dataclasses.replace(WORK, pp=stages, accumulate=micro_batches)
    made = step(gpus(1, stages), Run(0), found, work, model)
    one = 0.3 / stages
    assert made.step_s == pytest.approx((micro_batches + stages - 1) * one, rel=1e-6)
    assert made.seconds["pipeline"] / made.step_s == pytest.approx(
        (stages - 1) / (micro_batches + stages - 1), rel=1e-6
    )
    chunked = step(gpus(1, stages), Run(0, chunks=2), found, work, model)
    assert chunked.step_s == pytest.approx((micro_batches + (stages - 1) / 2) * one, rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_schedule_runs_each_micro_batch_forward_before_backward_once(stages, chunks):
    for stage in range(stages):
        order = schedule(stage, stages, 8, chunks if stages > 1 else 1)
        done = set()
        for kind, micro, chunk in order:
            assert (kind, micro, chunk) not in done
            assert kind == "F" or ("F", micro, chunk) in done
            done.add((kind, micro, chunk))
        assert len(done) == 2 * 8 * (chunks if stages > 1 else 1)


def test_tensor_parallel_layers_wait_for_four_all_reduces_each():
    machine, work = gpus(1, 4), dataclasses.replace(WORK, tp=4)
    size = WORK.sequence * MODEL.width * 4
    once = 2 * sum(ring(size, 4, 4, INSIDE, BETWEEN))
    made = step(machine, Run(0), work=work)
    assert made.seconds["tensor"] == pytest.approx(4 * 4 * once, rel=1e-6)
    assert made.step_s == pytest.approx(FORWARD + BACKWARD + OPTIMIZER / 4 + 4 * 4 * once, rel=1e-3)


@pytest.mark.parametrize("turns", [1.0, 1.2])
def test_ranks_beyond_the_cores_take_turns(turns):
    machine = Machine(1, 4, 1 << 40, 1e9, 1.0, False)
    made = step(machine, Run(0), rates(cores=2.0, turns=turns, inside=Link(0.0, 1e9)))
    assert made.step_s == pytest.approx(2 * turns * (FORWARD + BACKWARD + OPTIMIZER), rel=1e-4)
    enough = step(machine, Run(0), rates(cores=4.0, turns=turns, inside=Link(0.0, 1e9)))
    assert enough.step_s == pytest.approx(FORWARD + BACKWARD + OPTIMIZER, rel=1e-4)


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_carriers_send_what_the_stage_s_table_says(hosts, zero):
    """docs/communication.md: 2 (H - 1)/H N b at zero=0, half of it and updated slices at zero=2 and 3; packed means are 0.88."""
    machine = Machine(hosts, 2, 1 << 40, 1e9, 1.0, False)
    wire = Link(0.0, 1e-3)
    made = step(machine, Run(zero), rates(between=wire, inside=Link(0.0, 1e9)))
    share = (hosts - 1) / hosts * MODEL.numel * 4 / 1e6
    sent = 2 * 0.88 * share if zero == 0 else (1 + 0.88) * share
    assert made.link_busy * made.step_s == pytest.approx(sent, rel=1e-2)
    assert made.step_s > FORWARD + sent


def test_compression_shortens_a_step_that_the_wire_bounds_by_its_bytes():
    machine = Machine(2, 1, 1 << 40, 1.0, 1e-3, False)
    found = rates(between=Link(0.0, 1e-3))
    plain, half, block, factors = (
        step(machine, Run(0, compress=name), found) for name in (None, "bf16", "int8", "powersgd:2")
    )
    wires = [each.link_busy * each.step_s for each in (plain, half, block, factors)]
    assert wires[1] / wires[0] == pytest.approx(0.5 / 0.88, rel=1e-3)
    assert wires[2] / wires[0] == pytest.approx(1.125 / 4 / 0.88, rel=1e-3)
    assert wires[3] < 0.1 * wires[0]


def test_a_thousand_ranks_of_different_speeds_take_less_than_a_minute():
    begin = time.process_time()
    machine = gpus(128, 8)
    made = step(machine, Run(3, stragglers={rank: 1 + rank / 1024 for rank in range(1024)}))
    assert time.process_time() - begin < 60
    assert made.classes == 1024
    assert made.step_s >= (1 + 1023 / 1024) * (FORWARD + BACKWARD)


# failures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [200.0, 800.0, 3000.0])
@pytest.mark.parametrize("restart", [0.0, 300.0])
def test_goodput_among_exponential_failures_is_its_expectation(every, restart):
    """Of a gap G after the restart R, floor((G - R) / (t + C)) intervals t count: t e^(-R/M) / (e^((t + C)/M) - 1) of each M."""
    mtbf, cost = 10_000.0, 30.0
    expected = every * math.exp(-restart / mtbf) / (mtbf * math.expm1((every + cost) / mtbf))
    assert goodput(times_between(mtbf, 100_000), every, cost, restart) == pytest.approx(expected, rel=1e-2)


def test_the_best_interval_is_no_worse_than_young_s_or_daly_s_and_near_them():
    found = recover(10_000.0, 30.0, 300.0)
    assert found.goodput >= max(found.young_goodput, found.daly_goodput)
    assert found.goodput == pytest.approx(found.daly_goodput, rel=1e-3)
    assert found.every_s == pytest.approx(daly(30.0, 10_000.0), rel=0.15)
    assert found.young_s == young(30.0, 10_000.0) == pytest.approx(math.sqrt(2 * 30 * 10_000))


def test_an_interval_is_not_shorter_than_its_write():
    assert recover(10_000.0, 1.0, 0.0, write_s=2_000.0).every_s >= 2_000.0


# the command -----------------------------------------------------------------------------------------------------------

ARGUMENTS = [
    "plan",
    "--parameters",
    "1B",
    "--layers",
    "16",
    "--width",
    "2048",
    "--vocabulary",
    "32000",
    "--hosts",
    "2",
    "--ranks",
    "8",
    "--gpu",
    "h100",
]


def plan(capsys, *more):
    code = main([*ARGUMENTS, *more])
    return code, *capsys.readouterr()


def test_the_command_prints_the_step_its_parts_and_the_interval(capsys):
    code, out, _ = plan(capsys, "--simulate", "--straggler", "3=1.5")
    assert code == 0
    assert "Simulated, zero=0: a step takes" in out and "Without stragglers it takes" in out and "Daly's" in out
    code, out, _ = plan(capsys, "--simulate", "--zero", "3", "--json")
    found = json.loads(out)["simulation"]
    assert found["configuration"] == "zero=3" and found["ranks"] == 16
    assert sum(found["seconds"].values()) == pytest.approx(found["step_s"])


def test_a_calibration_replaces_the_table_s_rates(tmp_path, capsys):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"between": {"latency_us": 20, "bandwidth_GBps": 0.5}, "pairs": []}))
    slow = json.loads(plan(capsys, "--simulate", "--calibration", str(path), "--json")[1])["simulation"]
    assert slow["rates"]["between"]["bandwidth"] == 0.5
    assert slow["step_s"] > 2 * json.loads(plan(capsys, "--simulate", "--json")[1])["simulation"]["step_s"]


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--simulate", "--tp", "3"], "tp 3 x pp 1 x cp 1 must divide 2 hosts x 8 ranks = 16"),
        (["--simulate", "--tp", "8", "--pp", "4"], "tp 8 x pp 4 x cp 1 must divide 2 hosts x 8 ranks = 16"),
        (["--simulate", "--zero", "4"], "--zero must be 0, 1, 2 or 3, got 4"),
        (["--simulate", "--prefetch", "-1"], "--prefetch must be 0 to 64 units, got -1"),
        (
            ["--simulate", "--compress", "zip"],
            "--compress must be one of fp16, bf16, int8, int4, powersgd, or powersgd:RANK",
        ),
        (["--simulate", "--chunks", "2"], "--chunks must be 1 without pp, got 2"),
        (["--simulate", "--pp", "2", "--chunks", "2", "--accumulate", "3"], "--accumulate must be a multiple of pp, 2"),
        (["--simulate", "--straggler", "16=1.3"], "a rank of 0 to 15 and a factor of 1 to 1000, got 16=1.3"),
        (["--simulate", "--straggler", "1=nan"], "a rank of 0 to 15 and a factor of 1 to 1000, got 1=nan"),
        (["--simulate", "--straggler", "slow"], "--straggler must be RANK=FACTOR such as 17=1.3, got 'slow'"),
        (["--simulate", "--restart-seconds", "-1"], "--restart-seconds must be at least 0, got -1.0"),
        (["--compress", "bf16"], "--compress needs --simulate, which reads it"),
        (["--restart-seconds", "9"], "--restart-seconds needs --simulate, which reads it"),
        (["--simulate", "--form", "wrap"], "pass one of --simulate, --launch and --form"),
    ],
)
def test_input_that_no_ranks_can_have_is_a_sentence_with_the_legal_range(more, sentence, capsys):
    code, out, err = plan(capsys, *more)
    assert code == 2
    assert sentence in err and "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("[1]", "rates.json"),
        ("{", "rates.json"),
        ('{"links": {}}', 'must be a JSON object such as {"inside"'),
        ('{"inside": 3}', "inside must be an object"),
        ('{"inside": {"latency_us": 1}}', "inside.bandwidth_GBps must be a number above 0 and at most 1e9, got None"),
        ('{"inside": {"latency_us": -1, "bandwidth_GBps": 1}}', "inside.latency_us must be a number at least 0"),
        ('{"memory_GBps": "fast"}', "memory_GBps must be a number above 0"),
        ('{"memory_GBps": true}', "memory_GBps must be a number above 0"),
        ('{"cores": 0}', "cores must be a number"),
        (
            '{"compute": {"forward_s": 1, "backward_s": 0, "optimizer_s": 1}}',
            "compute.backward_s must be a number above 0",
        ),
    ],
)
def test_a_calibration_of_another_form_is_a_sentence_with_the_form(text, sentence, tmp_path, capsys):
    path = tmp_path / "rates.json"
    path.write_text(text)
    code, _, err = plan(capsys, "--simulate", "--calibration", str(path))
    assert code == 2
    assert sentence in err and "--calibration" in err


def test_ranks_without_a_rate_need_one(capsys):
    code = main(["plan", "--parameters", "1B", "--memory", "64GB", "--simulate"])
    assert code == 2
    assert "--simulate needs --peak" in capsys.readouterr().err


def test_no_calibration_means_the_machine_s_table():
    assert rates_of(gpus(1, 1)).inside.bandwidth == INSIDE.bandwidth
    with pytest.raises(PlanError, match="does not exist|No such file"):
        rates_of(gpus(1, 1), "/nowhere/rates.json")
