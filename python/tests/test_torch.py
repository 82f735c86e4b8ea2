"""PyTorch over the package, over loopback, started by torchrun."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from ranks import addresses, launched

CASES = pathlib.Path(__file__).with_name("torch_cases.py")
DEVICE_CASES = pathlib.Path(__file__).with_name("device_cases.py")
TORCH = importlib.util.find_spec("torch") is not None
VERSION = (0, 0)
if TORCH:
    import torch

    VERSION = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


def launcher(ranks, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", f"--max_restarts={restarts}"]
    if VERSION < (2, 0) and sys.version_info >= (3, 11):
        # Its default of "nothing is redirected" is None there. This value means the same.
        command += ["-r", "9:1", "-t", "9:1"]
    return command


def environment_of(**more):
    others = {name: value for name, value in os.environ.items() if not name.startswith("NETSUM_")}
    return others | more


def torchrun(*cases, ranks=2, script=CASES, **more):
    """Runs ranks by torchrun, which must all succeed. Returns the output."""
    return launched([*launcher(ranks), str(script), *cases], environment_of(**more))


def resumed(said):
    return [line for line in said if line["event"] == "resumed"]


@unittest.skipUnless(
    TORCH, "no PyTorch: Debian's python3-torch, or `cargo xtask test --torch pypi`"
)
class Hook(unittest.TestCase):
    def run_beside_gloo(self, *cases, ranks=2):
        return torchrun(*cases, ranks=ranks, NETSUM_PEERS=",".join(addresses(ranks)))

    def test_gradients_are_averaged_as_by_gloo_with_the_same_bits_everywhere(self):
        self.run_beside_gloo("hook", "integers", "half", "not_finite")

    def test_buckets_are_in_flight_beside_each_other(self):
        self.run_beside_gloo("beside", "workers")

    def test_unused_parameters_and_accumulated_gradients(self):
        self.run_beside_gloo("unused", "no_sync", ranks=3)

    def test_parameters_that_only_no_sync_has_used(self):
        said = self.run_beside_gloo("no_sync_unused")
        # PyTorch's own fault till 2.4: its ranks differ, by Gloo as by netsum.
        self.assertIn("SAME" if VERSION >= (2, 4) else "DIFFERENT", said)

    def test_what_cannot_be_summed_is_refused_with_what_to_do(self):
        self.run_beside_gloo("refused")

    def test_a_model_of_some_ranks_is_refused(self):
        self.run_beside_gloo("hook_of_a_subgroup", ranks=4)

    def test_the_rank_that_died_is_named(self):
        self.assertIn("NAMED", self.run_beside_gloo("dies"))


@unittest.skipUnless(
    TORCH, "no PyTorch: Debian's python3-torch, or `cargo xtask test --torch pypi`"
)
class Recorder(unittest.TestCase):
    """The flight recorder alone."""

    def dump(self, calls=3, **environment):
        """What is recorded of some calls, with only these variables set."""
        from netsum.torch import recorder

        names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
        others = {name: "" for name in names}
        with (
            mock.patch.object(recorder, "recorder", recorder._Recorder()) as alone,
            mock.patch.dict(os.environ, others | environment),
        ):
            group = alone.group(1, range(2))
            tensors = [torch.ones(2, 3)]
            entries = [
                recorder.begun(group, "all_reduce", tensors, tensors, 60) for _ in range(calls)
            ]
            entries[0].follows(torch.futures.Future())
            entries[-1].follows(torch.futures.Future())
            entries[-1].done()
            return recorder.dump_flight_recorder()

    def test_the_last_entries_are_kept(self):
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
            kept = self.dump(9, **{name: "4"})["entries"]
            self.assertEqual([entry["record_id"] for entry in kept], [5, 6, 7, 8])
        self.assertEqual(len(self.dump(2100)["entries"]), 2000)

    def test_states(self):
        dump = self.dump()
        states = [entry["state"] for entry in dump["entries"]]
        self.assertEqual(states, ["started", "scheduled", "completed"])
        self.assertEqual(
            dump["pg_status"]["0"],
            {
                "last_enqueued_collective": 3,
                "last_started_collective": 3,
                "last_completed_collective": 3,
            },
        )

    def test_a_size_of_0_turns_it_off(self):
        self.assertEqual(self.dump(TORCH_FR_BUFFER_SIZE="0")["entries"], [])

    def test_a_size_that_is_not_a_number_is_refused(self):
        import netsum

        with self.assertRaisesRegex(netsum.ConfigError, "TORCH_FR_BUFFER_SIZE=many: must be"):
            self.dump(TORCH_FR_BUFFER_SIZE="many")


@unittest.skipUnless(
    TORCH, "no PyTorch: Debian's python3-torch, or `cargo xtask test --torch pypi`"
)
class Backend(unittest.TestCase):
    def test_trains_and_does_all_that_the_network_can(self):
        torchrun(
            "trains", "collectives", "half_by_backend", ranks=3, NETSUM_PEERS=",".join(addresses(3))
        )

    def test_groups_in_clear_are_errors_where_sums_are_sealed(self):
        torchrun("sealed_groups", NETSUM_SECRET="a secret of the ranks")
        with tempfile.NamedTemporaryFile("w") as file:
            print("a secret of the ranks", file=file, flush=True)
            torchrun("sealed_groups", NETSUM_SECRET_FILE=file.name)

    def test_callbacks_may_wait_for_operations(self):
        torchrun("nested")

    def test_a_job_that_is_begun_anew(self):
        more = {"NETSUM_TEST_PORT": str(20_000 + os.getpid() % 10_000)}
        torchrun("again", ranks=3, **more)
        torchrun("again", ranks=3, NETSUM_IP=",".join(addresses(3)), **more)

    def test_groups_where_the_default_group_is_gloos(self):
        torchrun("among_gloo", ranks=3)

    def test_mistaken_calls_and_tensors_of_other_forms(self):
        torchrun("mistaken", "sparse")

    def test_groups_are_apart(self):
        torchrun("apart", ranks=3)

    def test_tensors_of_any_strides(self):
        torchrun("strided")

    def test_lists_of_several_sizes(self):
        torchrun("uneven", ranks=3)

    def test_ranks_that_call_for_different_things(self):
        for case in range(4):
            torchrun("differ", NETSUM_TEST_CASE=str(case))

    def test_a_call_that_one_rank_alone_refuses(self):
        torchrun("refused_alone")

    def test_groups_that_are_not_used_cost_nothing(self):
        torchrun("many_groups")

    @unittest.skipIf(VERSION < (2, 7), "not tried before 2.7")
    def test_uneven_inputs(self):
        torchrun("joined", ranks=3)

    @unittest.skipIf(VERSION < (2, 7), "not tried before 2.7")
    def test_compiled_models(self):
        torchrun("compiled")

    def test_the_groups_timeout(self):
        torchrun("timed")

    def test_an_interrupted_rank_ends(self):
        self.assertIn("ENDED", torchrun("interrupted"))

    def test_all_operators_and_types_without_gloo(self):
        torchrun("operators", ranks=3)

    def test_gloo_does_the_rest_and_that_is_said_once(self):
        torchrun("by_gloo", ranks=3)

    def test_ranks_without_a_box_find_one_another(self):
        torchrun("without_a_box", ranks=4)

    def test_a_warning_that_is_made_an_error_ends_all_ranks(self):
        torchrun("warning_is_an_error", ranks=3)

    def test_ranks_that_do_not_agree_on_a_box_are_told(self):
        torchrun("some_know")

    def test_the_rank_that_died_is_named(self):
        self.assertIn("NAMED", torchrun("dies_in_backend"))

    def test_the_flight_recorder_has_each_collective(self):
        torchrun("recorded")

    def test_profiler_ranges(self):
        torchrun("profiled")

    def test_detailed_debugging(self):
        torchrun("detailed", ranks=3, TORCH_DISTRIBUTED_DEBUG="DETAIL")

    def test_a_failure_writes_the_flight_recorders_file(self):
        cases = {
            "recorded_failure": "missed FR dumps from ranks ({1})",
            "recorded_timeout": "missing ranks: {1}\ncollective: nccl:all_reduce",
        }
        for case, found in cases.items():
            with self.subTest(case), tempfile.TemporaryDirectory() as folder:
                files = {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_"}
                self.assertIn("WRITTEN", torchrun(case, **files))
                if VERSION < (2, 9):
                    continue
                reader = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
                options = ["--allow-incomplete-ranks", folder]
                read = subprocess.run(
                    [*reader, *options], capture_output=True, text=True, timeout=120, check=False
                )
                said = read.stdout + read.stderr
                self.assertEqual(read.returncode, 0, said)
                self.assertIn(found, said)

    def test_training_resumes_after_a_rank_was_killed(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "checkpoint"
            options = ["--steps", "200", "--checkpoint", str(file)]
            script = str(CASES.parents[1] / "examples/train.py")
            command = [*launcher(2, restarts=1), script, *options]
            environment = environment_of(OMP_NUM_THREADS="1", TMPDIR=folder)
            with subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as started:
                said, more = [], ""
                try:
                    for line in started.stdout:
                        if not line.startswith("{"):
                            more += line
                            continue
                        said.append(json.loads(line))
                        if said[-1].get("step") == 25 and not resumed(said):
                            ranks = f"/proc/{started.pid}/task/{started.pid}/children"
                            rank = pathlib.Path(ranks).read_text().split()[-1]
                            os.kill(int(rank), signal.SIGKILL)
                    self.assertEqual(started.wait(60), 0, more)
                finally:
                    # Also the ranks, if torchrun has not ended them.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(started.pid, signal.SIGKILL)
        self.assertEqual(len(resumed(said)), 2, said)
        self.assertEqual({line["step"] % 10 for line in resumed(said)}, {0})
        self.assertGreaterEqual(resumed(said)[0]["step"], 20)
        weights = [line["weights"] for line in said if line["event"] == "trained"]
        self.assertEqual(weights[1:], weights[:1])

    @unittest.skipIf(VERSION < (2, 6), "FSDP2 is in PyTorch 2.6 or later")
    def test_sharded_weights(self):
        torchrun("sharded")


def no_gpu():
    """Why the tests with a GPU are skipped, if they are."""
    if not TORCH or VERSION < (2, 0):
        return "no PyTorch 2 for a GPU: `cargo xtask test --gpu` installs it"
    if not os.environ.get("NETSUM_TEST_GPU"):
        return "not asked for (--gpu)"
    return None if torch.cuda.is_available() else "no GPU that PyTorch's CUDA can use"


@unittest.skipUnless(
    TORCH, "no PyTorch: Debian's python3-torch, or `cargo xtask test --torch pypi`"
)
class Devices(unittest.TestCase):
    """A device made of threads, whose tensors are the host's."""

    device = {}

    def run_on_device(self, *cases, ranks=2, **more):
        return torchrun(*cases, ranks=ranks, script=DEVICE_CASES, **self.device, **more)

    def test_all_that_the_network_and_gloo_can(self):
        self.run_on_device("collectives", ranks=3)

    def test_calls_in_flight_keep_their_order(self):
        self.run_on_device("in_flight")

    def test_mistaken_calls(self):
        self.run_on_device("mistaken")

    def test_the_rank_that_died_is_named(self):
        self.assertIn("NAMED", self.run_on_device("dies"))

    def test_the_hook(self):
        self.run_on_device("hook", NETSUM_PEERS=",".join(addresses(2)))

    @unittest.skipIf(VERSION < (2, 0), "backends of devices are in PyTorch 2 or later")
    def test_another_backend_for_the_devices_tensors(self):
        self.run_on_device("other_backends")


@unittest.skipIf(no_gpu(), str(no_gpu()))
class Gpu(Devices):
    """The same on a GPU, which the ranks share."""

    device = {"NETSUM_TEST_DEVICE": "cuda"}

    def test_training(self):
        self.run_on_device("trains")


if __name__ == "__main__":
    unittest.main()
