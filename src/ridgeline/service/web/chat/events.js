// Reader of server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
// It reads the data of events. Names, ids and retry times are skipped, because the chat API has none.

export class EventReader {
  #line = "";  // the start of a line that has not ended
  #data = [];  // data lines of the event that has not ended

  // Takes the next part of the stream; returns the data of each event that ends in it.
  read(part) {
    const text = this.#line + part;
    const end = text.endsWith("\r") ? text.length - 1 : text.length;  // a "\n" may follow in the next part
    const lines = text.slice(0, end).split(/\r\n|\r|\n/);
    this.#line = lines.pop() + text.slice(end);
    const events = [];
    for (const line of lines) {
      if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "data") this.#data.push("");
      else if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      }
    }
    return events;
  }
}

// The JSON values of a stream of bytes up to [DONE]. An end without [DONE] is an error: the answer may be incomplete.
export async function* jsonEvents(stream) {
  const bytes = stream.getReader(), decoder = new TextDecoder(), events = new EventReader();
  try {
    for (;;) {
      const {value, done} = await bytes.read();
      if (done) throw new Error("The connection ended before the answer did.");
      for (const data of events.read(decoder.decode(value, {stream: true}))) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    bytes.cancel().catch(() => {});
  }
}
