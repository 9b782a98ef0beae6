"""A decorator that prints how long a function takes."""

import functools
import time


def timeit(func):
    """Prints the elapsed time and the processor time of each call."""

    @functools.wraps(func)
    def timed(*args, **kwargs):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        result = func(*args, **kwargs)
        elapsed, elapsed_cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        print(f"func: {func.__name__!r} took a total of {elapsed:2.4f} sec to run and {elapsed_cpu:2.4f} sec of CPU time")
        return result

    return timed
