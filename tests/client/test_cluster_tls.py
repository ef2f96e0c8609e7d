"""Tests nodes that speak TLS to each other, and nodes that must not work together."""

import contextlib
import shutil
import tempfile

import pytest
from certificate import Authority
from patience import wait_until
from server_process import ServerProcess
from fleet import THREADS, Fleet, complete, node, num_steps, wait_for_decode_nodes

PROMPT = list(range(400, 440))
USED = "renewed --cluster-tls files"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@contextlib.contextmanager
def pair(prefill_options, decode_options):
    """Starts a prefill node and a decode node, each with options of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options = (f"file:{folder}", "--transport", "tcp", *THREADS)
        decode = stack.enter_context(node("decode", *options, *decode_options))
        yield stack.enter_context(node("prefill", *options, *prefill_options)), decode


def test_a_pair_with_certificates_answers_as_one_server_does(authority):
    own = [authority.options(name, "IP:127.0.0.1") for name in ("one", "two")]
    with pair(*own) as (prefill, decode), ServerProcess(*THREADS) as alone:
        wait_for_decode_nodes(prefill, 1)
        for length in (3, 40, 900):
            prompt = (PROMPT * 23)[:length]
            options = {"max_tokens": 30, "temperature": 1, "seed": length}
            assert complete(prefill, prompt, **options) == complete(alone, prompt, **options)
        assert prefill.metric("corella_remote_tokens_total") > 0
        assert prefill.metric("corella_kv_sent_bytes_total") > 0
        assert num_steps(decode) > 0
        assert "without encryption" not in prefill.log() + decode.log()


def test_nodes_that_are_reached_by_name(authority):
    own = [
        (*authority.options(name, "DNS:localhost"), "--cluster-advertise", "localhost")
        for name in ("one", "two")
    ]
    with pair(*own) as (prefill, _):
        wait_for_decode_nodes(prefill, 1)

        def has_been_helped():
            # A node on a busy machine may be too late for one request.
            complete(prefill, PROMPT, max_tokens=5, temperature=0)
            return prefill.metric("corella_remote_tokens_total") > 0

        prefill.wait_until(has_been_helped, "tokens come back")


def test_renewed_files_are_used_without_a_restart(authority, tmp_path):
    own, successor = authority.options("own"), Authority(tmp_path, "successor")
    over_tcp = ("--transport", "tcp", *THREADS)
    with Fleet() as fleet:
        decode = fleet.decode(*over_tcp, *own)
        replace(own, successor.options("renewed"))
        prefill = fleet.node("prefill", *over_tcp, *successor.options("newcomer"))
        # A node checks its files every ten seconds, and calls a node that did not answer every five seconds.
        wait_for_decode_nodes(prefill, 1)
        complete(prefill, PROMPT, max_tokens=5, temperature=0)
        assert prefill.metric("corella_remote_tokens_total") == 4
        assert USED in decode.log()


@pytest.mark.night
def test_a_certificate_that_expires_in_use_is_refused_until_it_is_renewed(authority):
    own = authority.options("own")
    over_tcp = ("--transport", "tcp", *THREADS)
    with Fleet() as fleet:
        decode = fleet.decode(*over_tcp, *own)
        earlier = fleet.prefill(*over_tcp, *authority.options("earlier"))
        certificate = put_into_use(authority, decode, own)
        wait_until(lambda: authority.is_expired(certificate), "it expires")
        later = fleet.node("prefill", *over_tcp, *authority.options("later"))
        reason = "its certificate has expired: renew it"
        later.wait_until(lambda: reason in later.log(), "the later node says why it does not use the other")
        alone = complete(later, PROMPT, max_tokens=5, temperature=0)
        assert later.metric("corella_remote_tokens_total") == 0
        # Earlier connections stay.
        assert complete(earlier, PROMPT, max_tokens=5, temperature=0) == alone
        assert earlier.metric("corella_remote_tokens_total") == 4
        replace(own, authority.options("renewed"))
        wait_for_decode_nodes(later, 1)
        assert complete(later, PROMPT, max_tokens=5, temperature=0) == alone
        assert later.metric("corella_remote_tokens_total") == 4


def replace(old, new):
    """Overwrites the files of a node."""
    for old_file, new_file in zip(old[1::2], new[1::2]):
        if old_file != new_file:
            shutil.copy(new_file, old_file)


def put_into_use(authority, node, options):
    """Gives a node a certificate that expires soon, but not before the node uses it. Returns the certificate's file."""
    num_seconds, num_used = 20, node.log().count(USED)
    while True:
        certificate, key = authority.issue_for_seconds(f"brief{num_seconds}", num_seconds)
        replace(options, ("", certificate, "", key))
        node.wait_until(
            lambda: node.log().count(USED) > num_used or authority.is_expired(certificate), "the node looks at its files"
        )
        if node.log().count(USED) > num_used:
            return certificate
        num_seconds *= 2


def strangers(authority, folder):
    """Yields the options of two nodes, and a text in the log of one of them."""
    good = authority.options("good")
    foreign = Authority(folder, "foreign").options("stranger")
    no_tls = "it does not speak TLS: give it --cluster-tls-cert"
    yield good, (), no_tls
    yield (), good, no_tls
    other_authority = "does not come from this node's --cluster-tls-ca"
    yield good, foreign, other_authority


@pytest.mark.parametrize("which", [0, 1, 2])
def test_strangers_serve_alone_and_say_why(authority, tmp_path, which):
    prefill_options, decode_options, reason = list(strangers(authority, tmp_path))[which]
    with pair(prefill_options, decode_options) as (prefill, decode):
        prefill.wait_until(
            lambda: reason in prefill.log() + decode.log(), f"the log says: {reason}"
        )
        answer = complete(prefill, PROMPT, max_tokens=5, temperature=0)
        with ServerProcess(*THREADS) as alone:
            assert answer == complete(alone, PROMPT, max_tokens=5, temperature=0)
        assert prefill.metric("corella_remote_tokens_total") == 0
        assert prefill.metric("corella_decode_nodes", standing="healthy") == 0


def refused(*arguments):
    """Returns the error of a server that does not start."""
    with pytest.raises(AssertionError) as error:
        ServerProcess("--role", "decode", *arguments)
    message = str(error.value)
    assert "exited with" in message and "panicked" not in message
    return message


def test_files_that_cannot_work_are_one_line(authority, tmp_path):
    cert, key, ca = ("--cluster-tls-cert", "--cluster-tls-key", "--cluster-tls-ca")
    good = dict(zip(*[iter(authority.options("good"))] * 2))
    assert key in refused(cert, good[cert], ca, good[ca])
    missing = tmp_path / "nowhere.pem"
    assert f"cannot read {key} {missing}" in refused(cert, good[cert], key, missing, ca, good[ca])
    assert "has expired: renew it" in refused(*authority.options("expired", days=-1))
    assert "does not name 127.0.0.1" in refused(*authority.options("moved", "DNS:elsewhere"))


def test_an_open_port_without_certificates_is_warned_of(authority):
    everywhere = ("--role", "decode", "--cluster-listen", "0.0.0.0:0")
    host = ("--cluster-advertise", "127.0.0.1")
    with ServerProcess(*everywhere, *host, *THREADS) as server:
        assert "without encryption" in server.log()
    with ServerProcess(*everywhere, *host, *authority.options("good"), *THREADS) as server:
        assert "without encryption" not in server.log()
