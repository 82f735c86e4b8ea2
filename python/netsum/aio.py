"""Operations in flight, awaited."""

import asyncio
import os


async def wait(work):
    """Waits for an operation without a thread, by its descriptor, which becomes readable."""
    if not work.is_done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        # Several coroutines may wait for one operation, but a loop has one reader per descriptor.
        descriptor = os.dup(work.fileno())
        loop.add_reader(descriptor, lambda: done.done() or done.set_result(None))
        try:
            await done
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    return work.wait()
