// One session: its conversation, and every sampled token coloured by what training does with it.

import { element, short } from "/page/charts.js";

const MOST_TOKENS = 4000; // drawn at once per interaction; the rest on request

/** The page of one session; `data` is what /api/session answers. */
export function sessionPage(data) {
  const one = data.session;
  const tip = element("div", { class: "tip", hidden: "" });
  const page = element("div", { class: "session" },
    element("h1", {}, one.id),
    facts([
      ["fate", one.fate], ["ending", one.ending ?? "running"], ["task", `${one.task} · sample ${one.sample}`],
      ["purpose", one.purpose], ["reward", short(one.reward)], ["worker", one.worker],
      ["tokens", account(data.statistics.tokens)],
      ["rows", rows(data.statistics)],
      ["started", new Date(one.started_at * 1000).toLocaleString()], ["turn discount", data.turn_discount],
      ...Object.entries(one.tags),
    ]),
    legend(data.interactions),
    ...data.interactions.map((interaction) => turn(interaction, tip)),
    data.interactions.length ? null : element("p", { class: "empty" }, "No model call has finished in this session yet."),
    tip);
  return page;
}

function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

/** "36 recorded = 30 trained + 6 masked (greedy 6) + 0 dropped" */
function account(tokens) {
  const part = (name, counts) => {
    const all = Object.entries(counts);
    const why = all.length ? ` (${all.map(([reason, count]) => `${reason} ${count}`).join(", ")})` : "";
    return `${all.reduce((sum, [, count]) => sum + count, 0)} ${name}${why}`;
  };
  return `${tokens.recorded} recorded = ${tokens.trained} trained + ${part("masked", tokens.masked)} + ${part("dropped", tokens.dropped)}`;
}

function rows(statistics) {
  const merged = statistics.mergeable ? ` · ${statistics.merged} of ${statistics.mergeable} turns merged` : "";
  return `${statistics.rows}${merged}`;
}

/** Where a turn left what was recorded: the tokens on both sides. */
function parting(fork) {
  return element("details", { class: "quiet" },
    element("summary", {}, fork.detail || fork.reason),
    element("p", {}, fork.against ? `compared with ${fork.against}, the prompt differs from token ${fork.position} on` : ""),
    element("pre", {}, `…${fork.before}`),
    element("pre", {}, `recorded: ${fork.recorded}`),
    element("pre", {}, `request:  ${fork.requested}`));
}

function legend(interactions) {
  const versions = [...new Set(interactions.flatMap((one) => one.versions))].sort((a, b) => a - b);
  return element("p", { class: "legend-line" },
    element("span", { class: "token trained p4" }, "trained, likely"), " ",
    element("span", { class: "token trained p0" }, "trained, unlikely"), " ",
    element("span", { class: "token masked" }, "masked"),
    element("span", { class: "quiet" }, versions.length ? `  weight versions ${versions.join(", ")}; a thin bar marks a swap in mid-answer` : ""));
}

function turn(one, tip) {
  const notes = [
    `${one.prompt_tokens} prompt + ${one.token_ids.length} sampled tokens`,
    `${one.finish_reason} after ${one.seconds.toFixed(2)} s`, `T ${short(one.temperature)}`,
    `reward ${short(one.reward)}`, `credit ${short(one.credit)}`,
  ];
  const badges = [
    ...one.tags.map((tag) => element("span", { class: "badge" }, tag)),
    one.fork ? element("span", { class: "badge warn" }, `new row: ${one.fork.reason}`) : null,
  ];
  return element("section", { class: one.masked_for ? "turn masked-turn" : "turn" },
    element("h2", {}, `#${one.index} `, element("code", {}, one.id), ...badges),
    element("p", { class: "quiet" }, notes.join(" · ")),
    one.fork ? parting(one.fork) : null,
    ...one.messages.map((message) => bubble(message)),
    element("div", { class: "bubble assistant" }, element("b", {}, "assistant, as sampled"), tokens(one, tip)),
    ...one.reply.tool_calls.map((call) => element("pre", { class: "call" }, `${call.name}(${call.arguments})`)));
}

function bubble(message) {
  return element("div", { class: `bubble ${message.role}` },
    element("b", {}, message.role),
    message.reasoning ? element("details", {}, element("summary", {}, "reasoning"), element("pre", {}, message.reasoning)) : null,
    message.content ? element("pre", {}, message.content) : null,
    ...message.tool_calls.map((call) => element("pre", { class: "call" }, `${call.name}(${call.arguments})`)));
}

function tokens(one, tip) {
  const box = element("div", { class: "tokens" });
  const draw = (from, to) => {
    for (let at = from; at < to; at += 1) box.append(token(one, at));
  };
  const all = one.token_ids.length;
  draw(0, Math.min(all, MOST_TOKENS));
  if (all > MOST_TOKENS) {
    const more = element("button", { onclick: () => { more.remove(); draw(MOST_TOKENS, all); } }, `show ${all - MOST_TOKENS} more tokens`);
    box.append(more);
  }
  box.addEventListener("pointerover", (event) => {
    const at = event.target.dataset?.at;
    if (at === undefined) return;
    tip.replaceChildren(...details(one, Number(at)));
    tip.hidden = false;
    const place = event.target.getBoundingClientRect();
    tip.style.setProperty("left", `${Math.min(place.left, window.innerWidth - tip.offsetWidth - 12)}px`);
    const above = place.top - tip.offsetHeight - 6;
    tip.style.setProperty("top", `${above > 0 ? above : place.bottom + 6}px`);
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  return box;
}

function token(one, at) {
  const text = one.texts[at] ?? ` ${one.token_ids[at]} `;
  const logprob = one.logprobs[at];
  const level = logprob === null ? 0 : Math.max(0, Math.min(4, Math.ceil(4 + logprob))); // 4: p > e^-1 … 0: p < e^-4
  const swap = at > 0 && one.versions[at] !== one.versions[at - 1] ? " swap" : "";
  const kind = one.trained[at] ? `trained p${level}` : "masked";
  return element("span", { class: `token ${kind}${swap}`, "data-at": at }, visible(text));
}

/** Line breaks and tabs are shown as signs beside what they do. */
function visible(text) {
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

function details(one, at) {
  const logprob = one.logprobs[at];
  const why = one.trained[at] ? "trained" : `masked: ${one.masked_for ?? "constrained"}`;
  return [
    ["token", `${one.token_ids[at]}  ${JSON.stringify(one.texts[at] ?? "")}`],
    ["log-prob", logprob === null ? "–" : `${logprob.toFixed(4)}  (p ${Math.exp(logprob).toPrecision(3)})`],
    ["version", one.versions[at]],
    ["kept mass", short(one.kept_mass[at])],
    ["position", `${one.prompt_tokens + at} (output ${at})`],
    ["use", why],
  ].map(([name, value]) => element("div", {}, element("b", {}, name), ` ${value}`));
}
