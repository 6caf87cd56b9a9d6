"""Plain notation of docstrings as LaTeX and MathML."""

import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install 'fedbilevel[docs]'")

from website import mathematics
from website.notation import NotMathematics, latex, pieces


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("y_i <- y_i - gamma * g_y,i", r"y_{i} \leftarrow y_{i} - \gamma\,g_{y\text{,}i}"),
        ("u* = (mean H)^-1 mean f_y", r"u^{\ast} = {(\operatorname{mean}\,H)}^{-1}\,\operatorname{mean}\,f_{y}"),
        ("z - gamma m / (sqrt(s) + eps)", r"z - \frac{\gamma\,m}{\sqrt{s} + \varepsilon}"),
        ("(beta/tau_i) [q + 1]", r"\frac{\beta}{\tau_{i}}\,[q + 1]"),
        ("(I + W)/2 (p - s)", r"\frac{I + W}{2}\,(p - s)"),
        ("k_0 (m / (n + t))^(1/3)", r"k_{0}\,{\left( \frac{m}{n + t} \right)}^{1/3}"),
        ("sum_{q=0..Q} prod_{j=1..k} H_j", r"\sum\limits_{q = 0}^{Q}\,\prod\limits_{j = 1}^{k}\,H_{j}"),
        ("- d g_i / d x_i,m", r"-\frac{d\,g_{i}}{dx_{i\text{,}m}}"),
        ("|mean D_i| < eps_1", r"\lVert \operatorname{mean}\,D_{i} \rVert < \varepsilon_{1}"),
        ("|a_i|_1 + |S|", r"\lVert a_{i} \rVert_{1} + \lvert S \rvert"),
        ("k in {0..K-1}", r"k \in \{0,\dots,K - 1\}"),
        ("nu_i+ = d_x(new) + c a^2", r"\nu_{i}^{+} = d_{x}(\text{new}) + c\,a^{2}"),
        ("ubar_i + x_old + N' + u0", r"\bar{u}_{i} + x_{\text{old}} + N^{\prime} + u_{0}"),
        ("y^{t+1} = mean", r"y^{t + 1} = \operatorname{mean}"),
        ("x_i,m <= 2T", r"x_{i\text{,}m} \le 2T"),
        ("->", r"\to"),
    ],
)
def test_plain_notation_becomes_latex_and_mathml(plain, expected):
    assert latex(plain, display=True) == expected
    drawn = ElementTree.fromstring(mathematics.mathml(expected, alternative=plain))
    assert drawn.attrib["alttext"] == plain
    assert drawn.tag.endswith("math")
    assert "merror" not in ElementTree.tostring(drawn).decode()


def test_fractions_in_a_sentence_keep_their_slash():
    assert latex("(1 - tau)^2 / mu") == r"{(1 - \tau)}^{2}/\mu"


@pytest.mark.parametrize("plain", ["a client", "x +", "(x", "|x", "x ^", "mean of x", "(6)", "hello", "x y_", "f(x,)"])
def test_text_that_is_no_expression_is_refused(plain):
    with pytest.raises(NotMathematics):
        latex(plain)


@pytest.mark.parametrize(
    ("sentence", "expressions"),
    [
        ("u tracks u* = (mean H)^-1 mean f_y because it is linear in u.", ["u", "u* = (mean H)^-1 mean f_y", "u"]),
        ("A client takes a step, steps a u and A = I", ["u", "A = I"]),
        ("With I > 1 clients' drift is I times the u-step of AdaFBiO-G", ["I > 1", "I"]),
        ("(6) tau on x; eq. (6)-(13), 1e-7, 5/6, F2SA, num_steps", ["tau", "x"]),
        ("at most (1 - tau mu)^2 / mu (tau <= 1/L)", ["(1 - tau mu)^2 / mu", "tau <= 1/L"]),
        ("the mean of x, the sum over k of mean q", ["x", "k", "mean q"]),
        ("x, y, u <- means", ["x", "y", "u <- means"]),
        ("ubar_i = average of all u_k", ["ubar_i", "=", "u_k"]),
        ("2N + 3 rounds (sum: 2 d_x)", ["2N + 3", "2 d_x"]),
        ("it has -g_x = mean q - pi, eq. 6-7 and x -y", ["-g_x = mean q - pi", "x -y"]),
        ("no expression at all, in 10 words or 5 + 5", []),
    ],
)
def test_expressions_in_a_sentence(sentence, expressions):
    found = pieces(sentence)
    assert "".join(said for said, _ in found) == sentence
    assert [said for said, kind in found if kind] == expressions


def test_columns_that_two_lines_share_are_columns_of_the_table():
    table = mathematics.lines(["    R1   x <- y      1 round", "    R2   only words  1 round"])
    assert table.count("<tr>") == 2
    assert table.count("<td") == 6
    assert '<td colspan="1">only words</td>' in table
    assert '<span class="plain-display">x &#60;- y</span>' in table


def test_marked_expressions_and_dollars_are_drawn():
    marked, dollars = mathematics.marked("x_i < 1"), '<span class="arithmatex">\\(a &lt; b\\)</span>'
    page = mathematics.rendered(f"<p>{marked} {dollars}</p>")
    assert page.count("<math ") == 2
    assert 'alttext="x_i &lt; 1"' in page
    assert 'alttext="a &lt; b"' in page
    assert mathematics.rendered('<div class="arithmatex">\\[\na\n\\]</div>').count('display="block"') == 1
    assert mathematics.rendered("<p>x_i <- 1</p>") == "<p>x_i <- 1</p>"
