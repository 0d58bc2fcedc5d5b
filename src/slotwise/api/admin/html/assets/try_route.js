// The forms of the page of routes: each sends a request to this server, and shows what comes back as it comes.
"use strict";
(() => {
  const KEY = "slotwise-key"; // where this browser tab keeps the API key, for every page of this server
  const THEME = "slotwise-theme";
  const MOST = 200000; // characters of an answer that are shown; an event log never ends
  const OF_INTEREST = /^(content-type|retry-after|allow|x-(?!content-type-options))/;

  const key = document.getElementById("key");
  try {
    key.value = sessionStorage.getItem(KEY) ?? "";
    document.documentElement.classList.add(localStorage.getItem(THEME) ?? "system");
  } catch { /* a browser without storage asks for the key again, and follows the system */ }
  document.getElementById("door").addEventListener("submit", (event) => event.preventDefault());
  key.addEventListener("input", () => { try { sessionStorage.setItem(KEY, key.value); } catch { /* as above */ } });

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // The text that an event of a stream adds to the answer, of OpenAI's routes and Anthropic's.
  function added(data) {
    let event;
    try { event = JSON.parse(data); } catch { return ""; }
    const choice = event.choices?.[0];
    if (choice) return choice.delta?.content ?? choice.text ?? "";
    if (event.type === "response.output_text.delta") return event.delta ?? "";
    return event.type === "content_block_delta" ? event.delta?.text ?? "" : "";
  }

  function build(folded) {
    const route = JSON.parse(folded.dataset.route);
    const given = route.parameters.map((one) => {
      const input = one.values.length
        ? element("select", {}, element("option", { value: "", textContent: "" }),
          ...one.values.map((value) => element("option", { value, textContent: value })))
        : element("input", { type: "text", spellcheck: false, autocomplete: "off", required: one.in === "path" });
      return { ...one, input, label: element("label", {}, one.name, " ", input) };
    });
    const body = route.body && element("textarea", {
      value: JSON.stringify(route.body, null, 2), spellcheck: false, autocomplete: "off",
      rows: Math.min(16, JSON.stringify(route.body, null, 2).split("\n").length + 1) });
    const send = element("button", { type: "button", className: "main", textContent: "Send" });
    const stop = element("button", { type: "button", textContent: "Stop", disabled: true });
    const status = element("span", { className: "status" });
    status.setAttribute("role", "status");
    const headers = element("dl", { className: "headers" });
    const text = element("div", { className: "text" });
    const answer = element("pre", { hidden: true, tabIndex: 0 });
    answer.role = "region";
    answer.setAttribute("aria-label", "The answer");
    const curl = element("pre", { tabIndex: 0 });
    curl.role = "region";
    curl.setAttribute("aria-label", "The same request with curl");
    folded.append(element("div", { className: "form" },
      ...given.map((one) => one.label), ...(body ? [element("label", {}, "Body, as JSON", body)] : []),
      element("div", { className: "actions" }, send, stop, status), headers, text, answer,
      element("details", {}, element("summary", { textContent: "With curl" }), curl)));

    // The address: beside this page, perhaps below a proxy's prefix.
    function address() {
      let path = route.path.slice(1);
      const query = new URLSearchParams();
      for (const { name, in: place, input } of given) {
        if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value));
        else if (input.value) query.set(name, input.value);
      }
      return new URL(path + (String(query) && `?${query}`), location.href.replace(/[^/]*$/, ""));
    }

    function describe() {
      const quoted = (words) => `'${words.replaceAll("'", "'\\''")}'`;
      const parts = ["curl -N"];
      if (route.method !== "GET") parts.push(`-X ${route.method}`);
      parts.push(quoted(String(address())));
      if (key.value) parts.push('-H "Authorization: Bearer $SLOTWISE_API_KEY"');
      if (body) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(body.value)}`);
      curl.textContent = parts.join(" \\\n  ");
    }

    let running = null;
    async function request() {
      running?.abort();
      const mine = running = new AbortController();
      const began = performance.now(), elapsed = () => `${((performance.now() - began) / 1000).toFixed(2)} s`;
      send.disabled = true;
      stop.disabled = false;
      headers.replaceChildren();
      text.textContent = answer.textContent = "";
      answer.hidden = true;
      status.className = "status";
      status.textContent = "sent";
      try {
        const sent = { method: route.method, headers: {}, signal: mine.signal, cache: "no-store" };
        if (key.value) sent.headers.Authorization = `Bearer ${key.value}`;
        if (body) Object.assign(sent.headers, { "Content-Type": "application/json" });
        if (body) sent.body = body.value;
        const response = await fetch(address(), sent);
        const line = `${response.status} ${response.statusText}`.trim();
        status.classList.toggle("bad", !response.ok);
        status.textContent = `${line}, first byte after ${elapsed()}`;
        for (const [name, value] of response.headers) {
          if (OF_INTEREST.test(name)) headers.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
        }
        answer.hidden = false;
        const rest = await show(response, mine);
        status.textContent = `${line} after ${elapsed()}${rest}`;
      } catch (error) {
        status.classList.add("bad");
        status.textContent = error.name === "AbortError" ? `stopped after ${elapsed()}` : `not sent: ${error.message}`;
      } finally {
        send.disabled = false;
        stop.disabled = true;
      }
    }

    // Shows an answer as it comes.  Returns what there is to say of its end.
    async function show(response, mine) {
      const type = response.headers.get("content-type") ?? "";
      if (type.startsWith("application/json")) {
        const whole = await response.text();
        let shown = whole;
        try { shown = JSON.stringify(JSON.parse(whole), null, 2); } catch { /* it is shown as it came */ }
        answer.textContent = shown.slice(0, MOST);
        return shown.length > MOST ? `; the first ${MOST} characters are shown` : "";
      }
      const events = type.startsWith("text/event-stream");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let length = 0, rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return "";
        answer.append(value.slice(0, MOST - length));
        length += value.length;
        if (events) {
          const lines = (rest + value).split("\n");
          rest = lines.pop();
          text.append(lines.filter((line) => line.startsWith("data: ")).map((line) => added(line.slice(6))).join(""));
        }
        if (length > MOST) {
          mine.abort();
          return `; stopped after ${MOST} characters`;
        }
      }
    }

    send.addEventListener("click", request);
    stop.addEventListener("click", () => running?.abort());
    folded.addEventListener("input", describe);
    key.addEventListener("input", describe);
    describe();
  }

  for (const folded of document.querySelectorAll("details.try")) {
    folded.hidden = false;
    folded.addEventListener("toggle", () => build(folded), { once: true });
  }
  if (matchMedia("(max-width: 900px)").matches) document.querySelector(".jump details").open = false;
})();
