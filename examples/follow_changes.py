"""The feed: every object that is stored or removed, in order, as it happens."""

from __future__ import annotations

import moonpool


def main() -> None:
    with moonpool.connect(name="follower") as client, client.subscribe(snapshot=True) as feed:
        # What is there already comes first; what happens meanwhile isn't lost.
        for event in feed:
            if event.kind == "snapshot-end":
                break
            print(f"there: {event.key!r}, {event.size} bytes")

        client.put("follow/1", b"value", metadata=b"layer 7", wait_s=5)
        client.remove("follow/1")
        for _ in range(2):
            event = next(feed)
            print(f"{event.sequence}: {event.kind} {event.key!r} {event.reason} {event.metadata!r}")


if __name__ == "__main__":
    main()
