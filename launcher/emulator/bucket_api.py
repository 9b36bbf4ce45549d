"""placeholder"""

from __future__ import annotations

from launcher.emulator.bucket import Buckets
from launcher.emulator.web import Request, Response


class StorageApi:
    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets

    def answer(self, request: Request) -> Response:
        return Response(501)
