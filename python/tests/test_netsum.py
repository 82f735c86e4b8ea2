"""The package, over loopback: the ranks sum over the hosts' ring."""

import os
import pickle
import subprocess
import sys
import unittest

import netsum
from ranks import addresses, run, start


class Ranks(unittest.TestCase):
    def test_sums_are_in_place_and_right(self):
        run("sums")
        run("sums", ranks=3)

    def test_all_operators_and_dtypes(self):
        run("operators", ranks=3)

    def test_other_collectives_move_bytes_of_any_type(self):
        run("moves", ranks=3)

    def test_what_cannot_be_summed_is_refused_with_what_to_do(self):
        run("arguments")

    def test_tensors_come_by_dlpack(self):
        run("dlpack")

    def test_tensors_of_pytorch(self):
        try:
            import torch  # noqa: F401
        except ImportError:
            self.skipTest("no PyTorch")
        run("torch")

    def test_operations_in_flight_hold_their_arrays(self):
        run("in_flight")

    def test_finalizers_of_arrays_may_look_at_the_operation(self):
        run("finalized")

    def test_operations_in_flight_share_no_array(self):
        run("overlaps")

    def test_operations_are_awaited(self):
        run("coroutines")

    def test_python_goes_on_in_other_threads(self):
        run("threads")

    def test_ctrl_c_ends_a_wait(self):
        run("interrupt")

    def test_ctrl_c_ends_the_wait_for_other_ranks(self):
        with start("interrupted_at_the_start", 0) as rank:
            try:
                out, err = rank.communicate(timeout=20)
            finally:
                rank.kill()
        self.assertEqual(rank.returncode, 0, out + err)

    def test_ctrl_c_ends_the_wait_for_a_place(self):
        run("interrupt_where_all_places_are_taken")

    def test_who_looks_does_not_wait(self):
        run("looks")

    def test_forks_are_refused(self):
        run("fork")

    def test_a_forked_process_keeps_no_port(self):
        run("fork_keeps_no_port")

    def test_the_rank_that_died_is_named(self):
        run("dies")

    def test_the_rank_that_left_is_named(self):
        run("leaves")

    def test_different_calls_are_told_apart(self):
        run("mismatch")

    def test_a_call_that_one_rank_alone_refuses(self):
        run("refused_alone")

    def test_small_values_beside_large_ones_and_nan_are_told(self):
        run("small_beside_large", ranks=4)

    def test_few_floats(self):
        run("few_floats", ranks=3)

    def test_one_rank_needs_no_network_and_keeps_its_data(self):
        run("alone", ranks=1)


class Settings(unittest.TestCase):
    def setUp(self):
        names = [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "OMPI_COMM_WORLD_RANK",
            "PMI_RANK",
            "SLURM_PROCID",
            *[n for n in os.environ if n.startswith("NETSUM_")],
        ]
        saved = {name: os.environ.pop(name) for name in names if name in os.environ}
        self.addCleanup(os.environ.update, saved)

    def refused(self, kind, word, **settings):
        with self.assertRaises(kind) as raised:
            netsum.init(**settings)
        self.assertIn(word, str(raised.exception))

    def test_what_is_missing_is_named(self):
        self.refused(netsum.ConfigError, "torchrun")
        self.refused(ValueError, "set NETSUM_CONTROLLER", rank=0, ranks=2)
        self.refused(
            netsum.ConfigError, "netsum job create", rank=0, ranks=2, controller="127.0.0.1:1"
        )
        self.refused(netsum.ConfigError, 'no setting "colour"', colour="red")
        job = {"job": "j", "token": "t"}
        self.refused(
            netsum.ConfigError,
            "HOST:PORT of the box",
            rank=0,
            ranks=2,
            controller="127.0.0.1",
            **job,
        )
        self.refused(netsum.Error, "NETSUM_IP", rank=0, ranks=2, peers=["192.0.2.1", "192.0.2.2"])
        self.refused(
            netsum.ConfigError, "2 addresses for 3 ranks", rank=0, ranks=3, peers=addresses(2)
        )
        self.refused(
            netsum.UnreachableError,
            "did not answer",
            rank=0,
            ranks=2,
            peers=addresses(2),
            connect_timeout=0.3,
        )

    def test_a_controller_that_is_not_there_is_named(self):
        with self.assertRaises(netsum.ControllerError) as raised:
            netsum.init(
                rank=0, ranks=2, controller="127.0.0.1:1", job="a", token="b", connect_timeout=0.3
            )
        for word in ("127.0.0.1:1", "`netsum run` runs there"):
            self.assertIn(word, str(raised.exception))


class Check(unittest.TestCase):
    def check(self, *arguments, **environment):
        command = [sys.executable, "-m", "netsum.check", *arguments]
        base = {n: v for n, v in os.environ.items() if not n.startswith("NETSUM_") and n != "RANK"}
        return subprocess.run(
            command, env=base | environment, capture_output=True, text=True, timeout=60
        )

    def test_says_what_is_missing(self):
        done = self.check()
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("MISSING settings", done.stdout)
        controller = {"NETSUM_CONTROLLER": "127.0.0.1:1", "NETSUM_JOB": "j", "NETSUM_TOKEN": "t"}
        done = self.check(RANK="0", WORLD_SIZE="2", **controller)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("MISSING the controller at 127.0.0.1:1", done.stdout)

    def test_says_what_is_there(self):
        done = self.check(RANK="1", WORLD_SIZE="2", NETSUM_PEERS=",".join(addresses(2)))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"rank 1 of 2, at {addresses(2)[1]}", done.stdout)
        self.assertIn("NETSUM_TOKEN".lower()[7:], self.check("--help").stdout)


class Package(unittest.TestCase):
    def test_errors_go_to_other_processes(self):
        error = pickle.loads(pickle.dumps(netsum.RankDiedError("rank 3 has died", 3)))
        self.assertEqual((str(error), error.rank), ("rank 3 has died", 3))

    def test_every_name_has_a_text_and_a_type(self):
        import ast
        import pathlib

        stub = ast.parse(pathlib.Path(netsum.__file__).with_name("__init__.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        for kind in (netsum.Communicator, netsum.Work, netsum.Report):
            typed = {
                node.name
                for node in classes[kind.__name__].body
                if isinstance(node, ast.FunctionDef)
            }
            there = {name for name in vars(kind) if not name.startswith("_")}
            self.assertEqual({name for name in typed if not name.startswith("_")}, there)
            for name in there:
                self.assertTrue(getattr(kind, name).__doc__, f"{kind.__name__}.{name}")
        self.assertTrue(pathlib.Path(netsum.__file__).with_name("py.typed").exists())


if __name__ == "__main__":
    unittest.main()
