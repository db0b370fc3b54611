"""Names and tools drawn at random for made-up tool calls: what is new every time can only be copied, not remembered."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

VERBS = (
    "get find list show read fetch look check add make create start stop open close send save load store delete remove rename move "
    "copy update change set reset count measure compare sort merge split join book cancel order pay buy sell rent track plan "
    "schedule post print scan record play pause mute lock unlock enable disable assign invite report rate review archive "
    "restore export import upload download publish approve reject submit register notify ping query lookup retrieve resolve"
).split()
NOUNS = (
    "account address alarm album animal answer apple article author badge bag balance ball bank basket battery bed bike bill bird "
    "board boat book bottle box branch bridge budget building bus button cable camera camp car card cart case cat chair channel "
    "chapter chart child city class client clock cloud coat code coffee color comment company concert contact contract cook "
    "country course cup customer dance date day delivery desk device dinner dish doctor dog door dress drink driver engine "
    "event exam farm field file film fish flight floor flower folder food forecast forest friend fruit game garden gate gift "
    "glass goal grade group guest guide hall hand hat home horse hotel hour house image index invoice island item job journey "
    "key kitchen label lake lamp language leaf lesson letter level library light limit line list loan location machine mail map "
    "market match meal meeting member memory menu message meter minute mirror model money month moon movie museum name network "
    "news night note number office oil order owner package page paint paper parcel park part party password path patient payment "
    "pen person phone photo piece place plane plant plate player point pool port post price printer product profile project "
    "question queue radio rain rate recipe record region rent report request result review river road robot room route rule sale "
    "sample school score screen season seat sensor server service shelf ship shirt shoe shop sign size snow song sound speed "
    "sport stage star station step stock storm story street student style subject sugar sum sun table tag task tax teacher team "
    "test text ticket time title tool tour town toy train tree trip user value video village visit voice wall watch water wave "
    "weather week wheel wind window winter word work year zone"
).split()
SYLLABLES = (
    "ba be bo da de do fa fi ga go ka ke ki ko la le lo ma me mi mo na ne no pa pe po ra re ri ro sa se so ta te to va ve vi "
    "za zo bra cle dri fen gor hal jin kel lum mar nix pol quo rin sol tam ulv vor wex yor zan"
).split()
AFFIXES = "my new all do api user main data info tool now fast v2 by_id for_me".split()


def invented(rng: Random) -> str:
    """A word that is none: "tamriko"."""
    return "".join(rng.sample(SYLLABLES, rng.randint(2, 4)))


def word(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.2 else rng.choice(NOUNS)


def join(words: list[str], rng: Random) -> str:
    """Words as one name: mostly snake_case, sometimes camelCase, PascalCase, with a hyphen, or run together."""
    style = rng.choices(["snake", "camel", "pascal", "hyphen", "plain"], [12, 4, 1, 1, 1])[0]
    if style == "camel":
        return words[0] + "".join(w.capitalize() for w in words[1:])
    if style == "pascal":
        return "".join(w.capitalize() for w in words)
    return {"snake": "_", "hyphen": "-", "plain": ""}[style].join(words)


def function_name(known: str, rng: Random) -> str:
    """The known name, one akin to it ("get_weather": "find_weather", "weather_now"), or one that says nothing."""
    draw = rng.random()
    if draw < 0.25:
        return known
    last = known.split("_")[-1]
    if draw < 0.5:
        return join([rng.choice(VERBS), last], rng)
    if draw < 0.65:
        return join(
            rng.choice([[*known.split("_"), rng.choice(AFFIXES)], [rng.choice(AFFIXES), last], [last, word(rng)]]), rng
        )
    return join(
        [rng.choice(VERBS) if rng.random() < 0.7 else word(rng), *(word(rng) for _ in range(rng.choice([0, 1, 1, 2])))],
        rng,
    )


def parameter_name(known: str, rng: Random) -> str:
    """The known name, one akin to it ("city": "city_name"), or any word."""
    draw = rng.random()
    if draw < 0.45:
        return known
    if draw < 0.65:
        return join([known, rng.choice(["name", "id", "value", "text", word(rng)])], rng)
    return join([word(rng) for _ in range(rng.choice([1, 1, 2]))], rng)


def phrase(rng: Random) -> str:
    return " ".join(word(rng) for _ in range(rng.choice([1, 1, 2, 3])))


def title(rng: Random) -> str:
    return word(rng).capitalize()


def code(rng: Random) -> str:
    return "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=rng.randint(1, 3))) + str(rng.randint(1, 9999))


def flag(rng: Random) -> str:
    return rng.choice(["yes", "no"])


FILLS: tuple[tuple[str, Callable[[Random], Any]], ...] = (
    ("string", phrase), ("string", phrase), ("string", title), ("string", code), ("string", flag),
    ("integer", lambda r: r.randint(0, 20)), ("integer", lambda r: r.randint(0, 5000)), ("number", lambda r: r.randint(1, 999) / 10),
)  # fmt: skip
