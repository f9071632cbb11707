import httpx

from tests.certificates import nobody_trusted, trusting


def test_clients_of_tests_trust_nobody_and_installers_whom_they_trusted_before() -> None:
    before = trusting()
    with nobody_trusted():
        assert len(httpx.create_ssl_context().get_ca_certs()) == 1
        assert trusting() == before
