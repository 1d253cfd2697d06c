// Routes, polling and the overview. Reads only; the token of the URL travels as a header.

import { element, lineChart, many, short, stackedBar } from "/page/charts.js";
import { sessionPage } from "/page/tokens.js";

const PERIOD_MS = 2000;
const token = new URLSearchParams(location.search).get("token") ?? "";
const main = document.getElementById("main");
const state = document.getElementById("state");
let shown = "";

async function ask(path) {
  const answer = await fetch(path, { headers: { authorization: `Bearer ${token}` } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  document.getElementById("run").textContent = body.run;
  document.title = `areal · ${body.run}`;
  return body;
}

function card(title, value, note = "") {
  return element("div", { class: "card" }, element("span", {}, title), element("strong", {}, value), element("small", {}, note));
}

function reasons(title, counts) {
  const rows = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  return element("div", {}, element("h3", {}, title), rows.length
    ? element("table", {}, ...rows.map(([reason, count]) => element("tr", {}, element("td", {}, reason), element("td", { class: "number" }, short(count)))))
    : element("p", { class: "quiet" }, "none"));
}

function latest(curves, name) {
  const curve = curves.find((one) => one.name === name);
  return curve ? curve.values[curve.values.length - 1] : null;
}

async function overview() {
  const now = await ask("/api/overview");
  const recent = await ask("/api/sessions?limit=12");
  const lag = latest(now.curves, "train/lag_max");
  return [
    element("section", { class: "cards" },
      card("step", now.version ? String(now.version.step) : "–", now.version ? `version ${now.version.label}` : "no weights published yet"),
      card("sessions running", short(now.running_sessions), many(now.groups.running, "group")),
      card("queue", `${now.groups.accepted} / ${now.queue_limit}`, "groups waiting to be trained"),
      card("free slots", `${now.slots.free} / ${now.slots.all}`, now.accepting ? "taking sessions" : "not taking sessions"),
      card("groups trained", short(now.groups.consumed), lag === null ? `lag at most ${now.max_lag ?? "–"}` : `largest lag ${short(lag)}`),
      card("reward", short(latest(now.curves, "train/reward")), "last step"),
      card("tokens / s", short(latest(now.curves, "throughput/tokens_per_second")), "trained, last step")),
    element("section", {}, element("h2", {}, "Where every sampled token went"),
      stackedBar([["trained", "trained", now.tokens.trained], ["masked", "masked", now.tokens.masked],
        ["dropped", "dropped", now.tokens.dropped], ["pending", "pending", now.tokens.pending]]),
      element("p", { class: "quiet" }, `${now.tokens.recorded} recorded = the sum of these four`)),
    element("section", {}, element("h2", {}, "Curves"), now.curves.length
      ? element("div", { class: "charts" }, ...now.curves.map(lineChart))
      : element("p", { class: "empty" }, "No step has been trained yet.")),
    element("section", { class: "columns" },
      reasons("Groups dropped", now.dropped_groups), reasons("Sessions left out", now.dropped_sessions),
      reasons("Tokens masked", now.masked_tokens),
      reasons("Tokens lost, by task", Object.fromEntries(now.losses.map((loss) => [`${loss.task_id}: ${loss.reason}`, loss.tokens]))),
      workers(now)),
    element("section", {}, element("h2", {}, "Latest sessions"), table(recent.sessions)),
  ];
}

function workers(now) {
  return element("div", {}, element("h3", {}, "Workers"), now.workers.length
    ? element("table", {}, ...now.workers.map((one) => element("tr", {}, element("td", {}, one.id), element("td", { class: "number" }, many(one.running, "session")),
      element("td", { class: "number quiet" }, `${Math.max(0, now.time - one.heartbeat_at).toFixed(0)} s ago`))))
    : element("p", { class: "quiet" }, "none alive"));
}

function table(sessions) {
  if (!sessions.length) return element("p", { class: "empty" }, "No session has started yet.");
  const head = ["session", "task", "state", "calls", "tokens", "reward", "worker", "started"];
  return element("table", { class: "sessions" },
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", {}, name)))),
    element("tbody", {}, ...sessions.map((one) => element("tr", {},
      element("td", { class: "name" }, element("a", { href: `#/session/${encodeURIComponent(one.id)}` }, one.id)),
      element("td", { class: "name" }, one.task),
      element("td", {}, element("span", { class: `fate ${one.fate.split(" ")[0]}` }, one.fate)),
      element("td", { class: "number" }, String(one.interactions)),
      element("td", { class: "number" }, short(one.recorded)),
      element("td", { class: "number" }, short(one.reward)),
      element("td", {}, one.worker),
      element("td", { class: "quiet" }, new Date(one.started_at * 1000).toLocaleTimeString())))));
}

async function sessions(which) {
  const found = await ask(`/api/sessions?limit=500&state=${which}`);
  const choices = ["all", "running", "ended"].map((name) =>
    element("a", { href: `#/sessions/${name}`, class: name === which ? "chosen" : null }, name));
  return [element("section", {}, element("h2", {}, "Sessions"), element("p", { class: "choices" }, ...choices), table(found.sessions))];
}

async function session(id) {
  return [sessionPage(await ask(`/api/session?id=${encodeURIComponent(id)}`))];
}

/** The present route's page, and whether it changes while one looks at it. */
function route() {
  const [, place = "", rest = ""] = location.hash.split("/");
  if (place === "session") return [() => session(decodeURIComponent(rest)), false];
  if (place === "sessions") return [() => sessions(["running", "ended"].includes(rest) ? rest : "all"), true];
  return [overview, true];
}

async function refresh() {
  const asked = location.hash, [draw, live] = route();
  const reading = main.querySelector(".chart svg:hover"); // a curve under the pointer is not pulled away
  if (asked === shown && (!live || document.hidden || reading)) return;
  try {
    const parts = await draw();
    if (location.hash !== asked) return; // the reader went elsewhere meanwhile
    main.replaceChildren(...parts);
    if (asked !== shown) window.scrollTo(0, 0);
    shown = asked;
    state.textContent = live ? "live" : "";
    state.className = "";
  } catch (error) {
    state.textContent = error.message;
    state.className = "broken";
  }
}

window.addEventListener("hashchange", refresh);
setInterval(refresh, PERIOD_MS);
refresh();
