"""Sites in this process with certificates, for secure sums."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbilevel.sites.membership import Papers
from support.secure import Card, Owner
from support.sites.loopback import TRIAL, Loopback


def federation_of(folder, num=3, hosts=(), settings=TRIAL):
    authority = Ed25519PrivateKey.generate()
    party_of = lambda certificate: Owner(certificate, authority)
    papers = lambda name: Papers(Card(name, authority), party_of)
    return Loopback(folder / "sites", num, settings, hosts=hosts, papers=papers, party_of=party_of)


def plan_for(federation, layer, algorithm="fedbio", quorum=None, **more):
    number = sum(federation.clients.values()) or len(federation.names)
    task = {"name": "quadratic", "num_clients": number, "client_weights": "by_samples"}
    options = {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop", "aggregation": layer}
    quorum = quorum or len(federation.names)
    return federation.plan({"name": algorithm}, task, options=options, quorum=quorum, **more)
