"""Sizes in the user's words, and cores that no two workers share."""

import pytest

from pipeweaver.cluster import Workers, cores_of, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4 GiB", 4 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), (" 7 B ", 7)]
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert Workers(memory=text).memory_bytes == num_bytes


@pytest.mark.parametrize("text", ["4", "GiB", "4 gib", "-1 GiB", "4 GiB of it", "", "1e3 MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match='is not a size; write a number and a unit, such as "4 GiB"'):
        parse_bytes(text)


def test_zero_is_not_no_limit() -> None:
    with pytest.raises(ValueError, match="is zero; leave the key out for no limit"):
        parse_bytes("0 GiB")
    assert Workers().memory_bytes is None


def test_formatted_sizes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (2, 2), (3, 2), (7, 1)])
def test_cores_are_disjoint_or_none(workers: int, threads: int) -> None:
    cores = (2, 3, 5, 7, 11)
    given = [cores_of(worker, workers, threads, cores) for worker in range(workers)]
    if workers * threads > len(cores):
        assert given == [()] * workers
    else:
        assert [len(own) for own in given] == [threads] * workers
        assert len({core for own in given for core in own}) == workers * threads
