"""Sums of rows of several sites, of which the server learns the sum only.

This is the double masking of Bonawitz et al. (CCS 2017), with the sparse graph of Bell et al. (CCS
2020) above 30 members. Rows are 64-bit integers and sums wrap, so the sum is exact. Each member adds
its own mask to its row, and a mask with each neighbour, which cancels in the sum. If a member drops
out, the others restore its pairwise masks from shares. If a member sent its row and then drops out,
the others restore its own mask. A member gives one of the two halves of another member, never both.

Deviations from the paper:

1. A key epoch has many slots, one for each call, each with a key pair and two seeds of its own. All
   are published and shared at the start of the epoch, so a call needs three exchanges: rows,
   confirmation, unmasking. The paper's key, once restored after a drop, would reveal the pairwise
   masks of all calls before it, whose own masks the server knows. Here it reveals one slot.
2. A survivor sends the seed of its own mask itself. Shares restore it only if the survivor is gone.
3. The quorum of members that confirm the same survivors is above half of the members. Two different
   lists of survivors therefore need 2 * quorum - num_members dishonest members. The members of an
   epoch may be a cohort of the sites; the quorum is one of these members.
4. Members publish commitments to their seeds, so that wrong shares are noticed.

What a member must rely on: its own key, the certificates of the federation's authority, and that
fewer than 2 * quorum - num_members members help a dishonest server. The server can leave members
out of a sum down to the quorum and the site's floor, and can falsify sums. Sums of two calls at the
same point over different members differ by single rows; the site's policy limits repeated points.
"""

from __future__ import annotations

from importlib.util import find_spec

from fedbilevel.errors import SettingError

if any(find_spec(name) is None for name in ("cryptography", "Crypto")):
    raise SettingError(
        "secure sums need cryptography and PyCryptodome, which are not installed: pip install 'fedbilevel[secure]'."
    )

from fedbilevel.secure.member import Member
from fedbilevel.secure.nonces import Nonces
from fedbilevel.secure.tally import Tally
from fedbilevel.secure.terms import Nonce, Terms, usual_quorum

__all__ = ["Member", "Nonce", "Nonces", "Tally", "Terms", "usual_quorum"]
