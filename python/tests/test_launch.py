"""The scripts of deploy/launch, deploy/slurm and deploy/kubernetes; the hosts' ring sums."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from ranks import addresses, launched

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
SUM = str(DEPLOY / "launch/sum.py")
LINES = [f"rank {rank} of 2: 3 everywhere, summed by the ring" for rank in range(2)]


def lines(out):
    """The ranks' lines. A launcher may join them."""
    return sorted(re.findall("rank [0-9] of .*?ring", out))


def run(*command, **more):
    """The output of a command, with this Python first and without other jobs' variables."""
    words = ("NETSUM_", "SLURM_", "OMPI_", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(words)}
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}:/usr/sbin"
    return launched(command, environment | more)


class Launchers(unittest.TestCase):
    def needs(self, *programs):
        for program in programs:
            if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None:
                self.skipTest(f"no {program}")

    def test_torchrun(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("no PyTorch")
        import torch

        # Python 3.11 reads that default of "nothing is redirected" as None. This value means the
        # same, for ranks that do not exist.
        old = ["-r", "9:1", "-t", "9:1"] if torch.__version__.startswith("1.") else []
        script, where = (
            str(DEPLOY / "launch/torchrun.sh"),
            {"MASTER_ADDR": "127.0.0.1", "PER_HOST": "2"},
        )
        port = str(20_000 + os.getpid() % 10_000)
        out = run(
            script,
            "1",
            "0",
            *old,
            SUM,
            NETSUM_PEERS=",".join(addresses(2)),
            MASTER_PORT=port,
            **where,
        )
        self.assertEqual(lines(out), LINES)

    def test_mpirun(self):
        self.needs("mpirun")
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        script, slots = str(DEPLOY / "launch/mpirun.sh"), "localhost:2"
        out = run(script, slots, SUM, NETSUM_PEERS=",".join(addresses(2)), **root)
        self.assertEqual(lines(out), LINES)

    def test_slurm(self):
        self.needs("slurmctld", "slurmd", "munged", "srun", "unshare")
        if os.getuid() != 0:
            self.skipTest("namespaces need root")
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            root.chmod(0o755)
            etc, calls = root / "etc", root / "calls"
            shutil.copytree(DEPLOY / "slurm", etc)
            (etc / "slurm.conf").rename(root / "hooks.conf")
            hooks = (root / "hooks.conf").read_text().replace("/etc/slurm", str(etc))
            (root / "hooks.conf").write_text(hooks)
            (etc / "secret").write_text("secret\n")
            # In the place of the box: says how it was called.
            (root / "netsum").write_text(f'#!/bin/sh\necho "$@" $(cat) >> {calls}\n')
            (root / "netsum").chmod(0o755)
            with (etc / "netsum.env").open("a") as settings:
                settings.write(f"NETSUM={root}/netsum\nSECRET={etc}/secret\nTOKENS={root}/tokens\n")
                settings.write(f"export SLURM_CONF={root}/slurm.conf\n")
            script = str(pathlib.Path(__file__).with_name("slurm.sh"))
            names = "('NETSUM_CONTROLLER', 'NETSUM_JOB', 'NETSUM_TOKEN')"
            told = f"import os; print(*[os.environ[n] for n in {names}])"
            both = f'python3 -c "{told}"; exec python3 {SUM}'
            other = "echo other: ${NETSUM_JOB-none} ${NETSUM_CONTROLLER-none} ${NETSUM_TOKEN-none}"
            srun = 'srun -n 2 --comment=netsum sh -c "$0" && srun sh -c "$1"'
            out = run(
                script, folder, "sh", "-c", srun, both, other, NETSUM_PEERS=",".join(addresses(2))
            )
            self.assertIn("other: none none none", out)
            self.assertEqual(lines(out), LINES)
            controller, job, token = next(
                line.split() for line in out.splitlines() if "slurm-" in line
            )
            self.assertEqual((controller, job, len(token)), ("netsum-box:4790", "slurm-1", 32))
            created = f"job create slurm-1 --ranks 2 --token - {token}"
            self.assertEqual(calls.read_text().splitlines(), [created, "job delete slurm-1"])
            self.assertEqual(list((root / "tokens").iterdir()), [])

    def test_slurm_without_a_secret_has_no_token(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            shutil.copy(DEPLOY / "slurm/netsum.sh", root)
            (root / "netsum").write_text(f"#!/bin/sh\ntouch {root}/called\n")
            (root / "netsum").chmod(0o755)
            settings = (
                f"NETSUM={root}/netsum\nSECRET={root}/secret\nTOKENS={root}/tokens\n"
                "CONTROLLER=box:1\n"
            )
            (root / "netsum.env").write_text(settings)
            for secret in (None, "", "\n"):
                if secret is not None:
                    (root / "secret").write_text(secret)
                for context in ("prolog_slurmctld", "prolog_slurmd", "prolog_task"):
                    environment = {
                        "SLURM_SCRIPT_CONTEXT": context,
                        "SLURM_JOB_ID": "7",
                        "SLURM_JOB_UID": str(os.getuid()),
                    }
                    ended = subprocess.run(
                        ["sh", root / "netsum.sh"],
                        env=environment | {"SLURM_JOB_COMMENT": "netsum"},
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    self.assertEqual(ended.stdout, "")
                    if context != "prolog_task":
                        self.assertIn(f"no secret in {root}/secret: job 7 has no box", ended.stderr)
            self.assertEqual(
                sorted(path.name for path in root.iterdir()),
                ["netsum", "netsum.env", "netsum.sh", "secret"],
            )

    def test_scripts_are_sound(self):
        self.needs("shellcheck")
        scripts = [*DEPLOY.glob("launch/*.sh"), *DEPLOY.glob("slurm/*.sh")]
        self.assertEqual(len(scripts), 3)
        run("shellcheck", "-x", *map(str, scripts))

    def test_manifests_fit_the_schema_of_kubernetes(self):
        try:
            import kubernetes_validate
            import yaml
        except ImportError:
            self.skipTest("no kubernetes-validate of PyPI")
        kinds = []
        for file in sorted(DEPLOY.glob("kubernetes/*.yaml")):
            for manifest in yaml.safe_load_all(file.read_text()):
                kubernetes_validate.validate(manifest, "1.30", strict=True)
                kinds.append(manifest["kind"])
        self.assertEqual(
            sorted(kinds), ["ConfigMap", "DaemonSet", "Job", "Pod", "Secret", "Service"]
        )


if __name__ == "__main__":
    unittest.main()
