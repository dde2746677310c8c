import httpx
import pytest

from serve.server.fake_engine import FakeEngine
from serve.server.live import MODEL, serving
from tonnage.serve.server.limits import Keys, salt_of

ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/ledger"),
    ("GET", "/no/such/route"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/v1/../health/x"),
]
OPEN_ROUTES = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version"), ("GET", "/metrics")]


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"},
                                   {"Authorization": "right"}, {"Authorization": "Bearer"}])  # fmt: skip
def test_routes_ask_for_the_key(given: dict[str, str]) -> None:
    with serving(FakeEngine(), keys=["right"]) as live:
        for method, path in ROUTES:
            answer = httpx.request(method, live.url + path, headers=given)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", path


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer right"}])
def test_probes_and_metrics_need_no_key(given: dict[str, str]) -> None:
    with serving(FakeEngine(), keys=["right"]) as live:
        for method, path in OPEN_ROUTES:
            answer = httpx.request(method, live.url + path, headers=given)
            assert answer.status_code == 200, path


def test_any_of_the_keys_opens() -> None:
    with serving(FakeEngine(), keys=["right", "other"]) as live:
        for key in ("right", "other"):
            answer = httpx.get(f"{live.url}/v1/models", headers={"Authorization": f"bearer {key}"})
            assert answer.status_code == 200


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert Keys(["a", "longer", "x" * 99]).tenant(b"Bearer a")
    assert compared == [(32, 32)] * 3, "all of them, whichever matches, at one length"


def test_a_tenant_does_not_carry_the_key() -> None:
    assert "secret" not in (Keys(["secret"]).tenant(b"Bearer secret") or "secret")
    assert Keys(["one", "two"]).tenant(b"Bearer one") != Keys(["one", "two"]).tenant(b"Bearer two")


def test_salts_differ_wherever_a_part_does() -> None:
    parts = [("a", None, None), ("", "a", None), ("", None, "a"), ("a", "a", None), ("a", "b", None), ("a", None, "b")]
    parts += [("ab", None, None), ("", "a,b", None), ("", 'a", "b', None)]
    assert len({salt_of(*each) for each in parts}) == len(parts)
    assert salt_of("", None, None) == "" == salt_of("", "", "")


def test_prefixes_are_shared_within_a_tenant_only() -> None:
    prompt = list(range(5, 45))
    with serving(FakeEngine(), keys=["one", "two"]) as live:

        def cached(key: str, **words: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **words}
            answer = httpx.post(f"{live.url}/v1/completions", json=body, headers=headers)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one") == 0 and cached("one") > 0
        assert cached("two") == 0 and cached("two") > 0
        assert cached("one", user="somebody") == 0 and cached("one", user="somebody") > 0
        assert cached("one", cache_salt="mine") == 0 and cached("one", cache_salt="mine") > 0
