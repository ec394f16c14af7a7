"""Classes of patched models, which are made on demand."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from hf_qknorm.families.class_names import made_once


def test_threads_share_a_class() -> None:
    both = Barrier(2)
    make = made_once(lambda name: type(name, (), {"place": both.wait(timeout=60)}))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, "AA")
    assert first is second is make("A")
