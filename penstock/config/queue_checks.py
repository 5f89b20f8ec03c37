"""What is wrong with the queue's settings beside each other."""

from collections.abc import Iterator

from penstock.config.flow import QueueConfig


def queue_problems(queue: QueueConfig) -> Iterator[str]:
    """One line for each thing that is wrong."""
    seen: dict[str, int] = {}
    for i, band in enumerate(queue.bands):
        if not band.name:
            yield f"queue.bands[{i}].name: empty"
        elif band.name in seen:
            yield f"queue.bands[{i}].name: {band.name!r} is the name of queue.bands[{seen[band.name]}] already"
        seen.setdefault(band.name, i)
    if sum(band.share for band in queue.bands) > 1:
        yield "queue.bands: their shares add up to more than 1, so not all floors could be honoured"
