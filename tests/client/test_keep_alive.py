"""A silent stream shows that it still works: by a comment, or in Anthropic's API by a `ping`."""

import http.client
import json

import pytest
from fleet import SLOW, Fleet
from patience import PATIENCE_S

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
ANSWER = {"model": "corella-nano", "temperature": 0, "stream": True}

# The body of a request, the mark of a continuing answer, and the mark of its end.
APIS = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 20}, b": still working\n", b"data: [DONE]\n"),
    "/v1/completions": ({"prompt": "A fox and a lantern", "max_tokens": 20}, b": still working\n", b"data: [DONE]\n"),
    "/v1/responses": ({"input": MESSAGES, "max_output_tokens": 20}, b": still working\n", b"event: response.incomplete\n"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 20}, b"event: ping\n", b"event: message_stop\n"),
}


class Stream:
    """The lines of an answer, as they come."""

    def __init__(self, server, path):
        body, self.sign, self.end = APIS[path]
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        self._connection.request("POST", path, json.dumps(ANSWER | body), {"content-type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.lines = []

    def read_until(self, wanted):
        while not self.lines or self.lines[-1] != wanted:
            line = self._response.readline()
            assert line, self.lines
            self.lines.append(line)

    def text(self):
        """Returns the model's text, regardless of its parts."""
        events = [json.loads(line.removeprefix(b"data: ")) for line in self.lines if line.startswith(b"data: {")]
        texts = []
        for event in events:
            for choice in event.get("choices", []):
                texts.append(choice["delta"].get("content") if "delta" in choice else choice["text"])
            if event.get("type") == "response.output_text.delta":
                texts.append(event["delta"])
            if event.get("type") == "content_block_delta":
                texts.append(event["delta"]["text"])
        return "".join(text or "" for text in texts)


@pytest.fixture(scope="module")
def pair():
    """A prefill node, and a proxy that can hold back the rows which its decode node waits for."""
    with Fleet() as fleet:
        fleet.decode(*SLOW)
        yield fleet.prefill_behind_proxy(*SLOW)


def test_a_stream_that_is_held_up_says_that_it_still_works(pair):
    prefill, proxy = pair
    proxy.is_held = True
    streams = [Stream(prefill, path) for path in APIS]
    for stream in streams:
        stream.read_until(stream.sign)
    proxy.is_held = False
    for stream, path in zip(streams, APIS, strict=True):
        stream.read_until(stream.end)
        unhindered = Stream(prefill, path)
        unhindered.read_until(unhindered.end)
        assert stream.text() and stream.text() == unhindered.text(), "signs of life change nothing else"
