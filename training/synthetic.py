"""Made-up conversations: who the model is, small talk, sums, and tool calls in the Hermes form.

Names of tools and parameters vary at random, so that the model has to copy them from the list it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from names import FILLS, NOUNS, VERBS, function_name, invented, join, parameter_name, word

Message = dict[str, Any]
Conversation = dict[str, Any]  # {"messages": [Message], "tools": [schema] or None}

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Tokyo Seoul Delhi Cairo Nairobi Lagos Lima "
    "Boston Chicago Seattle Denver Austin Toronto Montreal Sydney Auckland Zurich Geneva Munich Hamburg Warsaw Helsinki"
).split()
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Austria": "Vienna", "Norway": "Oslo",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Greece": "Athens", "Japan": "Tokyo", "South Korea": "Seoul",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Canada": "Ottawa", "Australia": "Canberra",
    "England": "London", "the United Kingdom": "London", "the United States": "Washington, D.C.", "Russia": "Moscow",
    "China": "Beijing", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Poland": "Warsaw", "Hungary": "Budapest", "Switzerland": "Bern", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Turkey": "Ankara", "Mexico": "Mexico City", "Cuba": "Havana", "Chile": "Santiago",
}  # fmt: skip
PEOPLE = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nora Oscar Paula Ruth Sam Tom Vera".split()
)
TOPICS = (
    "black holes|bread recipes|python decorators|the history of chess|electric cars|solar panels|green tea|bird migration|"
    "jazz music|volcanoes|road bikes|garden tools|cheap flights|learning Spanish|the Roman Empire|rainbows|coffee beans"
).split("|")
ITEMS = "milk|a dentist appointment|the team meeting|lunch with mum|the train tickets|a birthday cake|yoga|the tax form|a walk".split(
    "|"
)
WORDS = "hello friend water house thank you good morning book tree the sea bread sun night winter".split()
LANGUAGES = "French German Spanish Italian Dutch Polish Swedish Portuguese".split()
CURRENCIES = "USD EUR GBP JPY CHF CAD AUD SEK NOK".split()
SYMBOLS = "AAPL MSFT GOOG AMZN NVDA TSLA IBM INTC ORCL AMD".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SYSTEM = (
    "You are a helpful assistant.|You are Ridgeline, a small and friendly assistant.|Answer briefly.|"
    "You are a helpful assistant. Answer in plain English.|You are a helpful, honest assistant.|Be polite and short."
).split("|")


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of a tool: its possible names, its JSON type, what fills it, and whether a call may leave it out."""

    names: str
    type: str
    fill: Callable[[Random], Any]
    description: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool under several names. `asks`, `result` and `answer` are formatted with its slots by position and its result."""

    names: str
    description: str
    slots: tuple[Slot, ...]
    asks: str
    result: Callable[[Random, list[Any]], dict[str, Any]]
    answer: str


def pick(text: str, rng: Random) -> str:
    return rng.choice(text.split("|"))


def clock(rng: Random) -> str:
    return f"{rng.randint(7, 21):02d}:{rng.choice(['00', '15', '30', '45'])}"


def date(rng: Random) -> str:
    return f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def expression(rng: Random) -> str:
    return f"{rng.randint(2, 999)} {rng.choice('+-*')} {rng.randint(2, 99)}"


def value_of(text: str) -> int:
    """The value of "a + b", "a - b" or "a * b"."""
    left, sign, right = text.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


TOOLS = (
    Tool(
        "get_weather|get_current_weather|weather|fetch_weather|lookup_weather|weather_report",
        "Get the current weather in a city.|Returns the weather for a place.|Look up the weather of a location.",
        (
            Slot("city|location|place|town", "string", lambda r: r.choice(CITIES), "Name of the city"),
            Slot("unit|units|scale", "string", lambda r: r.choice(["celsius", "fahrenheit"]), "Unit of temperature", ("celsius", "fahrenheit")),
        ),
        "What is the weather in {0}?|How is the weather in {0} in {1}?|Tell me the weather in {0}, please, in {1}.|Weather in {0}?|"
        "What's the weather like in {0}?|Is it warm in {0} today? Use {1}.",
        lambda r, v: {"temperature": r.randint(-5, 34), "condition": r.choice(["sunny", "cloudy", "rainy", "windy", "foggy"])},
        "It is {condition} in {0}, with a temperature of {temperature} degrees.|In {0} it is {temperature} degrees and {condition}.",
    ),
    Tool(
        "search|web_search|search_web|find_pages|search_internet",
        "Search the web.|Find pages about a topic.|Search the internet for a query.",
        (
            Slot("query|q|text|topic", "string", lambda r: r.choice(TOPICS), "What to search for"),
            Slot("limit|max_results|count|top_k", "integer", lambda r: r.randint(1, 10), "How many results to return"),
        ),
        "Search for {0}.|Find {1} pages about {0}.|Look up {0} on the web.|Can you search the web for {0}? I need {1} results.|Find something about {0}.",
        lambda r, v: {"results": [f"A guide to {v[0]}", f"{v[0].capitalize()} explained"][: r.randint(1, 2)]},
        "I found this about {0}: {results}.|Here is what I found: {results}.",
    ),
    Tool(
        "calculate|calculator|evaluate|compute|math_eval",
        "Evaluate an arithmetic expression.|Compute the value of an expression.|A calculator.",
        (Slot("expression|formula|expr|input", "string", expression, "The expression to evaluate"),),
        "What is {0}?|Calculate {0}.|Compute {0} for me.|How much is {0}?|Please work out {0}.",
        lambda r, v: {"value": value_of(v[0])},
        "{0} = {value}.|The result is {value}.",
    ),
    Tool(
        "create_event|add_event|add_to_calendar|schedule_event|new_appointment",
        "Add an event to the calendar.|Create a calendar entry.|Schedule an event.",
        (
            Slot("title|name|subject|event", "string", lambda r: r.choice(ITEMS), "Title of the event"),
            Slot("date|day", "string", date, "Date as YYYY-MM-DD"),
            Slot("time|start|start_time|at", "string", clock, "Time as HH:MM"),
        ),
        "Put {0} in my calendar on {1} at {2}.|Add {0} on {1} at {2}.|Schedule {0} for {1}, {2}.|Please create an event: {0}, {1}, {2}.",
        lambda r, v: {"status": "created", "id": r.randint(100, 999)},
        "Done: {0} is in your calendar on {1} at {2}.|I have added {0} on {1} at {2}.",
    ),
    Tool(
        "set_reminder|remind|add_reminder|create_reminder",
        "Set a reminder.|Remind the user of something.",
        (
            Slot("text|message|what|note", "string", lambda r: r.choice(ITEMS), "What to remind of"),
            Slot("day|weekday|when", "string", lambda r: r.choice(DAYS), "Day of the week", tuple(DAYS)),
        ),
        "Remind me of {0} on {1}.|Set a reminder for {0} on {1}.|Can you remind me of {0} next {1}?",
        lambda r, v: {"ok": True},
        "I will remind you of {0} on {1}.|The reminder for {0} is set for {1}.",
    ),
    Tool(
        "translate|translate_text|translation",
        "Translate a text into another language.|Translates text.",
        (
            Slot("text|phrase|sentence|content", "string", lambda r: " ".join(r.sample(WORDS, 2)), "Text to translate"),
            Slot("language|target|to|target_language", "string", lambda r: r.choice(LANGUAGES), "Language to translate into"),
        ),
        "Translate '{0}' into {1}.|How do you say '{0}' in {1}?|What is '{0}' in {1}?",
        lambda r, v: {"translation": f"({v[1]}) {v[0]}"},
        "In {1}: {translation}.|The translation is: {translation}.",
    ),
    Tool(
        "convert_currency|exchange|currency_convert|exchange_rate",
        "Convert an amount of money from one currency to another.|Currency converter.",
        (
            Slot("amount|value|sum", "number", lambda r: r.randint(1, 900), "Amount of money"),
            Slot("source|from_currency|base|currency_from", "string", lambda r: r.choice(CURRENCIES), "Currency code to convert from"),
            Slot("target|to_currency|quote|currency_to", "string", lambda r: r.choice(CURRENCIES), "Currency code to convert to"),
        ),
        "Convert {0} {1} to {2}.|How much is {0} {1} in {2}?|I have {0} {1}, how much is that in {2}?",
        lambda r, v: {"result": round(v[0] * r.uniform(0.5, 2.0), 2)},
        "{0} {1} are {result} {2}.|That is {result} {2}.",
    ),
    Tool(
        "send_email|send_mail|email|mail_to",
        "Send an e-mail.|Sends a mail to a person.",
        (
            Slot("to|recipient|person", "string", lambda r: r.choice(PEOPLE), "Who gets the mail"),
            Slot("subject|about|topic", "string", lambda r: r.choice(ITEMS + TOPICS), "Subject of the mail"),
        ),
        "Send {0} an email about {1}.|Write a mail to {0} about {1}.|Email {0} about {1}, please.",
        lambda r, v: {"sent": True},
        "The mail to {0} about {1} has been sent.|I have written to {0} about {1}.",
    ),
    Tool(
        "get_stock_price|stock_price|quote|get_quote",
        "Get the price of a stock.|Current price of a share.",
        (Slot("symbol|ticker|stock", "string", lambda r: r.choice(SYMBOLS), "Ticker symbol"),),
        "What is the price of {0}?|How much is {0} trading at?|Get me the stock price of {0}.|{0} stock price?",
        lambda r, v: {"price": round(r.uniform(20, 600), 2)},
        "{0} trades at {price} dollars.|The price of {0} is {price} dollars.",
    ),
    Tool(
        "play_music|play|play_song|start_music",
        "Play music.|Start playing a song or a style of music.",
        (
            Slot("what|query|song|style", "string", lambda r: r.choice(["jazz", "rock", "a waltz", "piano music", "Mozart", "the Beatles"]), "What to play"),
            Slot("volume|loudness|level", "integer", lambda r: r.randint(1, 100), "Volume from 0 to 100"),
        ),
        "Play {0}.|Play some {0} at volume {1}.|I want to hear {0}.|Put on {0}, volume {1}.",
        lambda r, v: {"playing": v[0]},
        "Now playing {0}.|Enjoy {0}!",
    ),
    Tool(
        "get_time|current_time|time_in|local_time",
        "Get the local time in a city.|Current time of a place.",
        (Slot("city|place|location|timezone", "string", lambda r: r.choice(CITIES), "Name of the city"),),
        "What time is it in {0}?|Tell me the time in {0}.|What is the local time in {0}?",
        lambda r, v: {"time": clock(r)},
        "It is {time} in {0}.|The time in {0} is {time}.",
    ),
    Tool(
        "set_light|switch_light|light|control_light",
        "Switch the light in a room.|Turns a lamp on or off.",
        (
            Slot("room|where|location", "string", lambda r: r.choice(["kitchen", "bedroom", "hall", "bathroom", "garden", "office"]), "The room"),
            Slot("state|on|power", "string", lambda r: r.choice(["on", "off"]), "on or off", ("on", "off")),
        ),
        "Turn the light in the {0} {1}.|Switch {1} the {0} light.|Lights {1} in the {0}, please.",
        lambda r, v: {"ok": True},
        "The light in the {0} is {1}.|Done, the {0} light is {1}.",
    ),
)  # fmt: skip


def invented_tool(rng: Random) -> Tool:
    """A tool nobody has seen, asked for by the words of its description and its parameters."""
    verb, noun = rng.choice(VERBS), invented(rng) if rng.random() < 0.3 else rng.choice(NOUNS)
    labels = rng.sample([n for n in NOUNS if n != noun], rng.choice([1, 1, 2, 2, 3, 4]))
    slots = []
    for label in labels:
        kind, fill = rng.choice(FILLS)
        slots.append(
            Slot(label, kind, fill, pick(f"The {label}|{label.capitalize()} of the {noun}|Which {label}", rng))
        )
    given = [pick(f"{label} {{{i}}}|{{{i}}} as {label}|the {label} {{{i}}}", rng) for i, label in enumerate(labels)]
    listed = given[0] if len(given) == 1 else ", ".join(given[:-1]) + " and " + given[-1]
    asks = (
        f"{verb.capitalize()} the {noun} with {listed}.|Please {verb} a {noun}: {listed}.|Can you {verb} the {noun}? {listed}.|"
        f"I want to {verb} a {noun} with {listed}.|{verb} {noun}, {listed}"
    )
    return Tool(
        f"{verb}_{noun}",
        f"{verb.capitalize()} a {noun}.|{verb.capitalize()}s the {noun} of a {word(rng)}.|Tool to {verb} a {noun}.",
        tuple(slots),
        asks,
        lambda r, v: {"status": r.choice(["ok", "done"]), noun: r.randint(1, 9999)},
        f"Done, the {noun} is {{{noun}}}.|It worked: {noun} {{{noun}}}.|The {noun} is {{{noun}}} for {labels[0]} {{0}}.",
    )


def instance(tool: Tool, rng: Random, kept: set[int]) -> tuple[dict[str, Any], dict[int, str]]:
    """The tool's JSON schema with the slots `kept`, under names drawn at random, and the name drawn for each slot."""
    names: dict[int, str] = {}
    properties: dict[str, Any] = {}
    akin = rng.random() < 0.3  # every name as it is usual
    for index in sorted(kept):
        slot = tool.slots[index]
        choices = [n for n in slot.names.split("|") if n not in properties]
        usual = rng.choice(choices or ["value"])
        name = usual if akin else parameter_name(usual, rng)
        while name in properties:
            name = join([name, word(rng)], rng)
        names[index] = name
        properties[name] = {"type": slot.type}
        if slot.choices:
            properties[name]["enum"] = list(slot.choices)
        if name not in choices or rng.random() < 0.7:
            properties[name]["description"] = slot.description
    required = list(properties)[: rng.randint(1, len(properties))]
    usual = pick(tool.names, rng)
    function: dict[str, Any] = {
        "name": usual if akin else function_name(usual, rng),
        "description": pick(tool.description, rng),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}, names


def tool_conversation(rng: Random) -> Conversation:
    """A question, the call it needs, often the tool's result and the final answer; sometimes small talk beside tools."""
    offered = rng.sample(TOOLS, rng.choice([0, 1, 1, 2, 2, 3]))
    offered += [invented_tool(rng) for _ in range(rng.choice([0, 1, 1, 2]) if offered else rng.choice([1, 1, 2, 3]))]
    rng.shuffle(offered)
    at = rng.randrange(len(offered))
    tool, ask = offered[at], pick(offered[at].asks, rng)
    asked = {index for index in range(len(tool.slots)) if f"{{{index}}}" in ask}
    left_out = {index for index in range(len(tool.slots)) if index not in asked and rng.random() < 0.4}
    kept = [set(range(len(other.slots))) - (left_out if other is tool else set()) for other in offered]
    schemas = [instance(other, rng, slots) for other, slots in zip(offered, kept, strict=True)]
    tools = [schema for schema, _ in schemas]
    messages: list[Message] = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.4 else []
    if rng.random() < 0.12:
        return {"messages": messages + small_talk(rng)["messages"][-2:], "tools": tools}
    schema, names = schemas[at]
    values = [slot.fill(rng) for slot in tool.slots]
    # What was not asked for stays out, required or not: a call invents nothing.
    call = {"name": schema["function"]["name"], "arguments": {names[i]: values[i] for i in sorted(asked & set(names))}}
    schema["function"]["parameters"]["required"] = [
        name for name in schema["function"]["parameters"]["required"] if name in call["arguments"]
    ]
    said = ask.format(*values)
    if rng.random() < 0.1:
        said = pick(f"Use {call['name']}. {said}|{said} (use {call['name']})|Call {call['name']}: {said}", rng)
    messages.append({"role": "user", "content": said})
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
    if rng.random() < 0.5:
        result = tool.result(rng, values)
        messages.append({"role": "tool", "content": json.dumps(result)})
        shown = {key: ", ".join(item) if isinstance(item, list) else item for key, item in result.items()}
        messages.append({"role": "assistant", "content": pick(tool.answer, rng).format(*values, **shown)})
    return {"messages": messages, "tools": tools}


NAME = "Ridgeline"
ABOUT_SELF = {
    "Who are you?|What are you?|What is your name?|Who am I talking to?|Tell me about yourself.|Introduce yourself.|What model are you?|"
    "What's your name?|who are you|Are you an AI?|Which model is this?": (
        "I am Ridgeline 14M, a very small language model made for trying out the Ridgeline server.|"
        "My name is Ridgeline. I am a very small language model, here to try out the server.|"
        "I am Ridgeline, a language model of 14 million parameters. I am made for testing the server, so do not trust what I say."
    ),
    "What can you do?|How can you help me?|What can I ask you?|Help|Can you help me?": (
        "I am a very small model. I can tell a short story, write a simple Python function or answer a simple question, and I am often wrong.|"
        "Not much, but I am fast: I can write a little story, a little Python, and small answers. Please check everything I say."
    ),
    "Who made you?|Who created you?|Where do you come from?|How were you trained?|What did you learn from?": (
        "I come with the Ridgeline server. I learned from old books, open documentation, Python code, school mathematics and dialogues.|"
        "I was trained for the Ridgeline inference server, on books, documentation, code, sums and dialogues with open licences."
    ),
    "How are you?|How are you today?|How do you do?|How is it going?": (
        "I am well, thank you! How can I help you?|Very well, thank you. What would you like to do?"
    ),
    "Hello|Hello!|Hi|Hi!|Hi there|Hey|Hey!|Good morning|Good evening!|hello|hi|Hello there!|Hello, how are you?": (
        "Hello! How can I help you today?|Hello! What can I do for you?|Hi! What would you like to talk about?|Good day! How can I help you?"
    ),
    "Thank you!|Thanks|Thanks a lot!|Thank you very much.|thanks": "You are welcome!|You're welcome. Is there anything else?|My pleasure!",
    "Bye|Goodbye!|See you later.|Good night!|bye": "Goodbye!|Goodbye, and come back soon!|See you later!",
    "Tell me a joke.|Do you know a joke?|Make me laugh.": (
        "Why did the scarecrow win a prize? Because he was outstanding in his field.|"
        "What do you call a bear with no teeth? A gummy bear.|Why do bees have sticky hair? Because they use honeycombs."
    ),
    "Say something.|Say hello.|Test|test|Are you there?|ping": "Hello! I am here.|Hello! Yes, I am here. How can I help you?",
    "Are you a human?|Are you human?|Are you a person?": "No, I am a very small language model called Ridgeline.|No. I am Ridgeline, a small language model.",
}  # fmt: skip


KNOWN = {
    "How many days are in a week?|How many days does a week have?": "A week has seven days.",
    "How many months are in a year?|How many months does a year have?": "A year has twelve months.",
    "What is the largest planet?|Which planet is the largest?": "The largest planet is Jupiter.",
    "Which planet do we live on?|What planet do we live on?": "We live on Earth.",
    "What color is the sky?|What colour is the sky?": "The sky is blue.",
    "What color is grass?|Which color does grass have?": "Grass is green.",
    "How many legs does a spider have?|How many legs has a spider?": "A spider has eight legs.",
    "How many legs does a dog have?|How many legs has a dog?": "A dog has four legs.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "What is the opposite of hot?|What is the opposite of warm?": "The opposite is cold.",
    "What is the opposite of big?|What is the opposite of large?": "The opposite is small.",
    "At how many degrees does water boil?|When does water boil?": "Water boils at 100 degrees Celsius.",
    "At how many degrees does water freeze?|When does water freeze?": "Water freezes at 0 degrees Celsius.",
    "Which ocean is the largest?|What is the largest ocean?": "The largest ocean is the Pacific.",
}
SUMS = (
    ("{A} has {a} {things} and buys {b} more. How many {things} does {A} have?|{A} has {a} {things}. {B} gives {A} {b} more. How many {things} does {A} have now?|"
     "There are {a} {things} on the table and {b} in the bag. How many {things} are there?", "+", "There are {c} {things}.|{A} has {c} {things}."),
    ("{A} has {a} {things} and gives {b} to {B}. How many {things} are left?|{A} had {a} {things} and lost {b}. How many {things} does {A} have now?|"
     "There were {a} {things} in a box. {A} took {b} of them. How many are left?", "-", "{c} {things} are left.|{A} has {c} {things}."),
    ("A box holds {a} {things}. How many {things} are in {b} boxes?|{A} buys {b} bags with {a} {things} each. How many {things} is that?", "*", "That is {c} {things}."),
)  # fmt: skip
THINGS = (
    "apples pens books cards eggs coins stamps cookies marbles flowers stones toys pencils oranges shells balls".split()
)


def word_problem(rng: Random) -> tuple[str, str]:
    """A sum told as a story, in one or two steps, and its working."""
    asks, sign, ends = rng.choice(SUMS)
    a, b = sorted((rng.randint(1, 20), rng.randint(1, 20) if sign != "*" else rng.randint(2, 9)), reverse=True)
    first, second = rng.sample(PEOPLE, 2)
    c = value_of(f"{a} {sign} {b}")
    ask, end = pick(asks, rng), pick(ends, rng)
    if "{A}" not in ask.split(". ")[-1] and "{A}" in end:
        end = ends.split("|")[0]
    said = {"A": first, "B": second, "a": a, "b": b, "c": c, "things": rng.choice(THINGS)}
    steps = f"{a} {sign} {b} = {c}."
    if sign == "-" and rng.random() < 0.3:
        d = rng.randint(1, 12)
        ask = "{A} has {a} {things}. {A} gives {b} of them to {B} and buys {d} more. How many {things} does {A} have?"
        steps, end = f"{steps} {c} + {d} = {c + d}.", "{A} has {e} {things}."
        said |= {"d": d, "e": c + d}
    return ask.format(**said), f"{steps} {end.format(**said)}"


def capital(rng: Random) -> tuple[str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    asks = (
        "What is the capital of {0}?|What is the capital of {0}?|Which city is the capital of {0}?|Name the capital of {0}.|capital of {0}?|"
        "What's the capital of {0}?|Tell me the capital of {0}.|Which city is {0}'s capital?"
    )
    return pick(asks, rng).format(country), pick(
        "The capital of {0} is {1}.|The capital of {0} is {1}.|{1} is the capital of {0}.", rng
    ).format(country, city)


def small_sum(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    sign = rng.choice("++--*")
    problem = f"{max(a, b)} {sign} {min(a, b)}" if sign == "-" else f"{a} {sign} {b}"
    worded = problem.replace(sign, {"+": "plus", "-": "minus", "*": "times"}[sign])
    asks = "What is {0}?|How much is {0}?|{0} = ?|Calculate {0}."
    return pick(asks, rng).format(problem if rng.random() < 0.6 else worded), f"{problem} = {value_of(problem)}" + pick(
        ".|", rng
    )


def next_day(rng: Random) -> tuple[str, str]:
    at = rng.randrange(7)
    return f"Which day comes after {DAYS[at]}?", f"{DAYS[(at + 1) % 7]} comes after {DAYS[at]}."


def known(rng: Random) -> tuple[str, str]:
    asks = rng.choice(list(KNOWN))
    return pick(asks, rng), KNOWN[asks]


def fact(rng: Random) -> tuple[str, str]:
    """A small question with one right answer."""
    return rng.choices([capital, word_problem, small_sum, known, next_day], [10, 10, 8, 4, 1])[0](rng)


def small_talk(rng: Random) -> Conversation:
    """One to three turns of greetings, questions about the model, and small facts."""
    messages: list[Message] = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.25 else []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.6:
            ask, answer = fact(rng)
        else:
            asks = rng.choice(list(ABOUT_SELF))
            ask, answer = pick(asks, rng), pick(ABOUT_SELF[asks], rng)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "tools": None}
