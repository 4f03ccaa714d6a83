"""A dump in a store, as the domain reads it (`eagle3.dump.source.ByteSource`)."""

from infra.store import Store, missing


class StoreSource:
    """The files under a store's prefix."""

    def __init__(self, store: Store) -> None:
        self._store, self.where = store, store.uri

    def size(self, name: str) -> int:
        for key, size in self._store.list(name):
            if key == name:
                return size
        raise missing(self._store.uri_of(name))

    def read(self, name: str, start: int, length: int) -> bytes:
        return self._store.get_range(name, start, length)
