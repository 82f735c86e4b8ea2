"""Operations in flight, awaited."""

import asyncio


async def wait(work):
    """Waits for an operation without a thread: its descriptor is readable when it is done."""
    if not work.is_done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        descriptor = work.fileno()
        loop.add_reader(descriptor, lambda: done.done() or done.set_result(None))
        try:
            await done
        finally:
            loop.remove_reader(descriptor)
    return work.wait()
