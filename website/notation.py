"""Plain notation of docstrings, such as `u_i <- u_i - tau * (H_i u_i - f_y,i)`, as LaTeX.

`pieces` finds expressions in a sentence, and `latex` translates one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

GREEK = {name: rf"\{name}" for name in ("alpha", "beta", "gamma", "delta", "zeta", "eta", "theta", "kappa", "lambda")}
GREEK |= {name: rf"\{name}" for name in ("mu", "nu", "xi", "pi", "rho", "tau", "Phi")}
GREEK |= {"eps": r"\varepsilon", "lam": r"\lambda", "om": r"\omega"}
FUNCTIONS = {name: rf"\operatorname{{{name}}}" for name in ("mean", "means", "diag", "softmax", "argmin")}
FUNCTIONS |= {name: rf"\{name}" for name in ("sum", "prod", "min", "max", "log", "exp", "sqrt")}
ALONE = ("mean", "means")  # may end an assignment: x <- mean
RELATIONS = {"<-": r"\leftarrow", "->": r"\to", "<=": r"\le", ">=": r"\ge", "~": r"\approx", "in": r"\in"}
RELATIONS |= {sign: sign for sign in "=<>"}
BRACKETS = {"(": ")", "[": "]", "{": "}"}
ARTICLES = ("a", "A")

TOKEN = re.compile(
    r"""(?P<space>\s*)(?:
    (?P<compound>[A-Za-z]{2,}(?:-[A-Za-z]+)+)
    |(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    |(?P<name>[A-Za-z]+\d*                                          # tau or u0
        (?:_(?:\{[^{}]*\}|[A-Za-z0-9]+(?:,[A-Za-z0-9]+)*))?'?       # _{j=1..k} or _x,i, and a prime
        (?![\w'])(?:\*(?![*\w])|\+(?=[\s,;:)\]]|$))?)(?!-[A-Za-z]{2})  # u* or x+, but not u-step
    |(?P<word>[A-Za-z][\w'-]*)
    |(?P<sign><-|->|<=|>=|\.\.|[-+*/=<>~^|()\[\]{},;_])
    |(?P<other>\S)
    )""",
    re.VERBOSE,
)
NAME = re.compile(r"(?P<base>[A-Za-z]+?)(?P<bar>bar)?(?P<digits>\d*)(?:_(?P<sub>.+?))?(?P<prime>'?)(?P<mark>[*+]?)")


class NotMathematics(ValueError):
    """Raised where plain text cannot be read as an expression."""


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int
    spaced: bool  # blanks before it


def tokens(text: str) -> list[Token]:
    found = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or ""
        said = match[kind]
        is_word = kind == "compound" or (kind == "name" and not _known(said))
        found.append(Token("word" if is_word else kind, said, match.start(kind), match.end(), bool(match["space"])))
    return found


def _known(name: str) -> bool:
    """Whether a name is a symbol or a function: one character, a Greek name, or one of FUNCTIONS."""
    found = NAME.fullmatch(name)
    base = found["base"] if found else ""
    return len(base) == 1 or base in GREEK or base in FUNCTIONS


def symbol(name: str) -> str:
    """LaTeX of a name with its subscript, prime, star or plus: f_x,i or ubar_i or u*."""
    found = NAME.fullmatch(name)
    if found is None:
        raise NotMathematics(name)
    base = GREEK.get(found["base"]) or FUNCTIONS.get(found["base"]) or found["base"]
    base = rf"\bar{{{base}}}" if found["bar"] else base
    sub = found["digits"] or found["sub"] or ""
    above = ""
    if sub.startswith("{"):
        low, _, above = sub[1:-1].partition("..")
        sub, above = Expression(low, display=False).whole(), above and Expression(above, display=False).whole()
    elif sub:
        sub = r"\text{,}".join(_subscript(part) for part in sub.split(","))
    above += r"\prime" * bool(found["prime"]) + {"*": r"\ast", "+": "+", "": ""}[found["mark"]]
    limits = r"\limits" if found["base"] in ("sum", "prod") and above else ""
    return base + limits + (f"_{{{sub}}}" if sub else "") + (f"^{{{above}}}" if above else "")


def _subscript(part: str) -> str:
    if part in GREEK:
        return GREEK[part]
    return part if len(part) == 1 or part.isdigit() or set(part) <= {"x", "y"} else rf"\text{{{part}}}"


class Expression:
    """A reader of plain notation. It stops before the first token that does not belong to an expression.

    Factors side by side are a product. A fraction takes the factor before a slash, or all
    factors of the product where blanks surround the slash.
    """

    def __init__(self, text: str, *, display: bool, start: int = 0) -> None:
        self.tokens = tokens(text)
        self.place = start
        self.display = display
        self.bars = 0
        self.symbols = 0  # names and functions read

    def whole(self) -> str:
        out = self.relation()
        if self.place < len(self.tokens):
            raise NotMathematics(self.tokens[self.place].text)
        return out

    def peek(self, ahead: int = 0) -> Token:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else Token("end", "", 0, 0, True)

    def tried(self, read: Callable[[], str]) -> str | None:
        """What `read` finds, or None with the place restored."""
        place, symbols, bars = self.place, self.symbols, self.bars
        try:
            return read()
        except NotMathematics:
            self.place, self.symbols, self.bars = place, symbols, bars
            return None

    def relation(self) -> str:
        out = self.sum()
        while (sign := self.peek()).text in RELATIONS or sign.text == "..":
            if sign.text == "in" and self.peek(1).text != "{":
                break
            said = r",\dots," if sign.text == ".." else f" {RELATIONS[sign.text]} "
            right = self.tried(lambda: self.after(self.sum))
            if right is None:
                break
            out += said + right
        return out

    def after(self, read: Callable[[], str]) -> str:
        self.place += 1
        return read()

    def sum(self) -> str:
        sign = self.peek().text if self.peek().text in ("+", "-") else ""
        out = sign + (self.after(self.product) if sign else self.product())
        while self.peek().text in ("+", "-") and self.peek().kind == "sign":
            sign = self.peek().text
            right = self.tried(lambda: self.after(self.product))
            if right is None:
                break
            out += f" {sign} {right}"
        return out

    def product(self) -> str:
        factors = [self.power()]
        while True:
            token = self.peek()
            if token.text == "/":
                over = self.tried(lambda: self.after(self.denominator))
                if over is None:
                    break
                factors = self.fraction(factors, over, spaced=token.spaced)
                continue
            step = 1 if token.text == "*" else 0
            if step == 0 and not self.operand():
                break
            blank = r"\," if step or token.spaced else ""
            factor = self.tried((lambda: self.after(self.power)) if step else self.power)
            if factor is None:
                break
            factors += [blank, factor]
        return "".join(factors)

    def denominator(self) -> str:
        """One factor; after the d of a derivative also the variable."""
        first = self.power()
        return first + self.power() if first == "d" else first

    def fraction(self, factors: list[str], over: str, *, spaced: bool) -> list[str]:
        above, before = ("".join(factors), []) if spaced else (factors[-1], factors[:-1])
        if not self.display:
            return [*before, above, "/", over]
        return [*before, rf"\frac{{{_bare(above)}}}{{{_bare(over)}}}"]

    def operand(self) -> bool:
        """Whether the next token begins a factor. An article before a word does not."""
        token = self.peek()
        if token.kind == "name":
            return not (token.text in ARTICLES and self.peek(1).kind in ("word", "end"))
        return token.kind == "number" or token.text in BRACKETS or (token.text == "|" and not self.bars)

    def power(self) -> str:
        out = self.atom()
        while self.peek().text == "^" and not self.peek().spaced:
            raised = self.tried(lambda: self.after(self.exponent))
            if raised is None:
                raise NotMathematics("^")
            plain = re.fullmatch(r"\\?\w+(_\{(?:[^{}]|\{,\})*\})?", out)  # both indices then stand above each other
            out = f"{out}^{{{raised}}}" if plain else f"{{{out}}}^{{{raised}}}"
        return out

    def exponent(self) -> str:
        token = self.peek()
        if token.text in BRACKETS:
            display, self.display = self.display, False  # a fraction would be too small to read
            inside = self.bracket()
            self.display = display
            return _bare(inside) if len(inside) > 3 or token.text == "{" else inside
        sign = token.text if token.text in ("+", "-") else ""
        if sign:
            self.place += 1
        return sign + self.atom(bare=True)

    def atom(self, *, bare: bool = False) -> str:
        token = self.peek()
        if token.kind == "number":
            self.place += 1
            return token.text
        if token.kind == "name":
            return self.name(bare=bare)
        if token.text in BRACKETS:
            return self.bracket(factor=self.place > 0 and token.spaced)
        if token.text == "|" and not self.bars:
            return self.norm()
        raise NotMathematics(token.text)

    def name(self, *, bare: bool) -> str:
        token = self.peek()
        found = NAME.fullmatch(token.text)
        base = found["base"] if found else ""
        before = self.tokens[self.place - 1].text if self.place else ""
        self.place += 1
        out = symbol(token.text)
        self.symbols += 1
        if base == "sqrt" and self.peek().text == "(":
            return rf"\sqrt{{{_bare(self.bracket())}}}"
        if base in FUNCTIONS and not bare and not self.operand() and not (base in ALONE and before in RELATIONS):
            raise NotMathematics(token.text)
        if self.peek().text == "(" and not self.peek().spaced:
            out += self.bracket(words=True)
        return out

    def bracket(self, *, words: bool = False, factor: bool = False) -> str:
        """A pair of brackets and what is inside, separated by commas.

        A number alone is a reference, and a condition after a factor is a remark: both raise.
        """
        left = self.peek().text
        right, bars, self.bars = BRACKETS[left], self.bars, 0
        self.place += 1
        inside = []
        while True:
            if words and self.peek().kind == "word":
                inside.append(rf"\text{{{self.peek().text}}}")
                self.place += 1
            else:
                inside.append(self.relation())
            mark = self.peek().text
            self.place += 1
            if mark == right:
                break
            if mark not in (",", ";"):
                raise NotMathematics(mark)
            inside.append(mark + r"\,")
        self.bars = bars
        said = "".join(inside)
        if (not words and said.isdigit()) or (factor and left == "(" and re.search(r" (=|<|>|\\le|\\ge) ", said)):
            raise NotMathematics(said)
        if re.fullmatch(r"\\frac(\{[^{}]*(\{[^{}]*\})?\}){2}", said) and self.peek().text != "^":
            return said
        left, right = (rf"\{left}", rf"\{right}") if left == "{" else (left, right)
        return rf"\left{left} {said} \right{right}" if r"\frac" in said else left + said + right

    def norm(self) -> str:
        self.bars, self.place = 1, self.place + 1
        inside = self.sum()
        if self.peek().text != "|":
            raise NotMathematics(self.peek().text)
        self.bars, self.place = 0, self.place + 1
        bar = "vert" if re.fullmatch("[A-Z]", inside) else "Vert"  # a set has a size, a vector a norm
        out = rf"\l{bar} {inside} \r{bar}"
        if self.peek().text == "_" and not self.peek().spaced:
            out += f"_{{{self.after(lambda: self.atom(bare=True))}}}"
        return out


def _bare(said: str) -> str:
    """Without the brackets around all of it."""
    said = re.sub(r"^\\left(\(.*)\\right\)$", r"\1)", said)
    if said[:1] != "(" or said[-1:] != ")":
        return said.removeprefix(r"\{").removesuffix(r"\}") if said.startswith(r"\{") else said
    depth = 0
    for place, letter in enumerate(said):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place < len(said) - 1:
            return said
    return said[1:-1]


def latex(plain: str, *, display: bool = False) -> str:
    """LaTeX of an expression or of a relation sign by itself."""
    return RELATIONS.get(plain) or Expression(plain, display=display).whole()


def pieces(text: str) -> list[tuple[str, bool]]:
    """The text cut into words (False) and expressions (True), each as it is written."""
    found, out, place, done = tokens(text), [], 0, 0
    while place < len(found):
        end = _end(text, found, place)
        if end > place:
            start, stop = found[place].start, found[end - 1].end
            out += [(text[done:start], False), (text[start:stop], True)]
            done = stop
        place = max(end, place + 1)
    return [(said, kind) for said, kind in [*out, (text[done:], False)] if said]


def _end(text: str, found: Sequence[Token], place: int) -> int:
    """The token after the expression that begins at a token, which is that token where none begins."""
    token = found[place]
    if token.kind == "sign" and token.text in ("<-", "->", "=") and (token.spaced or place == 0):
        return place + 1
    reader = Expression(text, display=False, start=place)
    negative = token.text == "-" and (token.spaced or place == 0) and not reader.peek(1).spaced
    begins = (reader.operand() or negative) and reader.tried(reader.relation) is not None
    return reader.place if begins and reader.symbols and not _article(found, place, reader.place) else place


def _article(found: Sequence[Token], place: int, end: int) -> bool:
    """Whether an expression begins with the article: alone, or before a symbol without a sign between."""
    return found[place].text in ARTICLES and (end == place + 1 or found[place + 1].kind != "sign")
