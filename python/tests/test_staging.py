"""Tensors of a device: in which order copies and calls happen, with a device made of threads."""

import importlib.util
import threading
import time
import unittest

TORCH = importlib.util.find_spec("torch") is not None
if TORCH:
    import fake_device
    import torch

    from netsum.torch import staging
    from netsum.torch.completion import Handle

    fake_device.install()


def until(condition):
    """Waits for something that must happen."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.001)


class Call:
    """A call that was started, and is done when the test says so."""

    def __init__(self, hosts):
        self.hosts, self.seen = hosts, hosts[0].clone()
        self.source, self.handle = torch.futures.Future(), Handle()
        self.handle.follow(self.source.then, self._finish)
        self.error = None

    def _finish(self, _):
        if self.error:
            raise self.error
        return self.hosts

    def end(self, value=None, error=None):
        if value is not None:
            self.hosts[0].fill_(value)
        self.error = error
        self.source.set_result(None)


@unittest.skipUnless(
    TORCH, "no PyTorch: Debian's python3-torch, or `cargo xtask test --torch pypi`"
)
class Staging(unittest.TestCase):
    def setUp(self):
        fake_device.done.clear()
        fake_device.allocated.clear()
        self.calls, self.refused, self.chunk = [], [], staging.CHUNK
        self.staging = staging.Staging(self, self.refused.append)
        self.addCleanup(self.end)

    def end(self):
        staging.CHUNK = self.chunk
        self.staging.queue.put(None)
        self.staging.thread.join(30)
        self.assertFalse(self.staging.thread.is_alive())

    def start(self, tensors):
        fake_device.done.append(("call", tensors[0].flatten()[:1].tolist()))
        self.calls.append(Call(tensors))
        return self.calls[-1].handle

    def run_on(self, tensor, use="rw"):
        return self.staging.run(self.start, ([tensor],), (use,), (1,))

    def test_nothing_is_read_before_the_streams_work_or_written_before_the_sum(self):
        x = fake_device.tensor(torch.ones(3))
        with fake_device.hold():
            x.add_(1)
            # It returns, though nothing moves.
            handle = self.run_on(x)
        until(lambda: self.calls)
        self.assertEqual(self.calls[0].seen.tolist(), [2, 2, 2])
        self.assertEqual([what for what, _ in fake_device.done], ["out", "call"])
        self.assertFalse(handle.is_completed())
        self.assertEqual(x.tolist(), [2, 2, 2])
        with fake_device.hold():
            self.calls[0].end(7)
            # It returns, though the copy back has not been made: the stream waits for it.
            self.assertTrue(handle.wait())
            y = x + 1
        self.assertEqual(y.tolist(), [8, 8, 8])
        self.assertEqual([what for what, _ in fake_device.done], ["out", "call", "back"])
        self.assertIs(handle.result()[0], x)

    def test_copies_wait_for_the_callers_stream(self):
        x, go = fake_device.tensor(torch.ones(3)), threading.Event()
        fake_device.current_stream().put(lambda: go.wait(30))
        x.add_(1)
        handle = self.run_on(x)
        until(lambda: self.staging.streams[x.device].out.waits or fake_device.done)
        self.assertFalse(fake_device.done)
        go.set()
        until(lambda: self.calls)
        self.assertEqual(self.calls[0].seen.tolist(), [2, 2, 2])
        self.calls[0].end()
        handle.wait()

    def test_chunks_overlap(self):
        staging.CHUNK = 4096
        values = torch.arange(3000.0)
        x = fake_device.tensor(values)
        handle = self.run_on(x)
        # All are in flight at once.
        until(lambda: len(self.calls) == 3)
        self.assertEqual([len(call.seen) for call in self.calls], [1024, 1024, 952])
        self.assertTrue(torch.equal(torch.cat([call.seen for call in self.calls]), values))
        # The next one is copied out before one is started.
        order = [what for what, _ in fake_device.done]
        self.assertEqual(order.count("out"), 3)
        self.calls[1].end(1)
        # It is copied back while others are in flight.
        until(lambda: ("back", [1.0]) in fake_device.done)
        self.assertFalse(handle.is_completed())
        self.calls[0].end(0)
        self.calls[2].end(2)
        handle.wait()
        expected = torch.cat([torch.full((count,), i) for i, count in enumerate((1024, 1024, 952))])
        self.assertTrue(torch.equal(x.cpu(), expected.float()))

    def test_the_next_chunk_is_copied_while_one_is_started(self):
        staging.CHUNK = 4096
        begun, go = threading.Event(), threading.Event()

        def slow(tensors):
            begun.set()
            self.assertTrue(go.wait(30))
            return self.start(tensors)

        handle = self.staging.run(slow, ([fake_device.tensor(torch.zeros(3000))],), ("r",), (1,))
        self.assertTrue(begun.wait(30))
        until(lambda: len(fake_device.done) == 2)
        self.assertEqual([what for what, _ in fake_device.done], ["out", "out"])
        go.set()
        until(lambda: len(self.calls) == 3)
        for call in self.calls:
            call.end()
        handle.wait()

    def test_columns_of_rows_are_cut(self):
        staging.CHUNK = 2 * 4096
        whole = torch.arange(2 * 3000).reshape(2, 3000).int()
        x, out = fake_device.tensor(whole), fake_device.tensor(torch.zeros(3000).int())

        def scattered(output, given):
            output.copy_(given[1])
            call = self.start([output])
            self.calls[-1].end()
            return call

        self.staging.run(scattered, (out, x), ("w", "r"), (1, 2)).wait()
        self.assertEqual(len(self.calls), 3)
        self.assertTrue(torch.equal(out.cpu(), whole[1]))
        self.assertTrue(torch.equal(x.cpu(), whole))

    def test_pinned_memory_is_used_again_and_bounded(self):
        for i in range(20):
            handle = self.run_on(fake_device.tensor(torch.full((2000 + i,), float(i))))
            until(lambda count=i + 1: len(self.calls) == count)
            self.assertTrue((self.calls[-1].seen == i).all())
            self.calls[-1].end()
            handle.wait()
        self.assertEqual(fake_device.allocated, [8192])
        staging.CHUNK = 4096
        self.staging.pool = pool = staging.Pool(limit=3 * 4096)
        x = fake_device.tensor(torch.arange(10_240.0))
        handle = self.run_on(x)
        for i in range(10):
            until(lambda count=i: len(self.calls) > 20 + count)
            self.assertLessEqual(pool.used, pool.limit)
            self.calls[20 + i].end(-float(i))
        handle.wait()
        expected = torch.arange(10.0).neg().repeat_interleave(1024)
        self.assertTrue(torch.equal(x.cpu(), expected))
        self.assertEqual(fake_device.allocated[1:], [4096] * 3)
        until(lambda: pool.used == 0)
        # Other sizes make room, and what does not fit is alone.
        handle = self.run_on(fake_device.tensor(torch.zeros(1024)), "r")
        big = self.staging.run(self.start, ([fake_device.tensor(torch.zeros(9000))],), ("r",))
        until(lambda: len(self.calls) == 31)
        self.calls[30].end()
        until(lambda: len(self.calls) == 32)
        self.calls[31].end()
        handle.wait()
        big.wait()
        self.assertEqual(sum(map(len, pool.free.values())), 0)

    def test_errors_reach_the_one_who_waits(self):
        x = fake_device.tensor(torch.ones(3))
        handle = self.run_on(x)
        until(lambda: self.calls)
        memory = self.calls[0].hosts[0].data_ptr()
        self.calls[0].end(5, KeyError("rank 1 died"))
        with self.assertRaisesRegex(KeyError, "rank 1 died"):
            handle.wait()
        self.assertEqual(x.tolist(), [1, 1, 1])
        self.assertFalse(handle.is_success())
        # The operation may still write to it.
        handle = self.run_on(x)
        until(lambda: len(self.calls) == 2)
        self.assertNotEqual(self.calls[1].hosts[0].data_ptr(), memory)
        self.calls[1].end(6)
        handle.wait()
        self.assertEqual(x.tolist(), [6, 6, 6])
        self.assertFalse(self.refused)

        def refused(tensors):
            raise ValueError("not so")

        handle = self.staging.run(refused, ([x],), ("rw",), (1,))
        with self.assertRaisesRegex(ValueError, "not so"):
            handle.wait()
        self.assertEqual(list(map(str, self.refused)), ["not so"])

    def test_calls_start_in_their_order(self):
        x, host = fake_device.tensor(torch.ones(1)), torch.full((1,), 2.0)
        with fake_device.hold():
            handles = [self.run_on(x)]
            self.assertTrue(self.staging.needs([host]))
            handles += [self.run_on(host), self.run_on(fake_device.tensor(torch.full((1,), 3.0)))]
        until(lambda: len(self.calls) == 3)
        self.assertEqual([call.seen.item() for call in self.calls], [1, 2, 3])
        for call in self.calls:
            call.end()
        for handle in handles:
            handle.wait()
        until(lambda: not self.staging.needs([host]))

    def test_callbacks_of_the_future_run_after_the_copy_is_queued(self):
        x = fake_device.tensor(torch.ones(3))
        handle = self.run_on(x)
        told = handle.get_future().then(lambda future: [t.shape for t in future.value()])
        until(lambda: self.calls)
        self.calls[0].end(4)
        self.assertEqual(told.wait(), [(3,)])


if __name__ == "__main__":
    unittest.main()
