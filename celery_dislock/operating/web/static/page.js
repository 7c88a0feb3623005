// The page: asks for JSON every few seconds, and shows it.
//
// All that is shown is set as text, never as markup: keys, task names and ids come from messages.
// What the page shows is in the address after "#", so it can be kept, sent, and gone back to.
"use strict";

const POLL = 3000; // milliseconds between two questions
const POLL_MOST = 60000; // while they fail
const GIVE_UP = 20000; // milliseconds until a question has failed
const TYPING = 300; // milliseconds after the last key until a search is asked for

const byId = (id) => document.getElementById(id);
const alertBox = byId("alert");

let view = {}; // what the address asks for
let asked = 0; // counts views, so that a late answer to an earlier one is dropped
let timer = 0;
let failures = 0;
let seenAt = null; // when what is shown was true
let lastLock = null;
let searchTimer = 0;
let answer = () => {}; // takes that to the last question
let isRefused = false; // who looks at it may not, or not any more

class Trouble extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// Asking.

async function ask(path, fields) {
  const stop = new AbortController();
  const late = setTimeout(() => stop.abort(), GIVE_UP);
  const options = { signal: stop.signal, credentials: "same-origin", redirect: "error", cache: "no-store" };
  if (fields) {
    options.method = "POST";
    options.body = new URLSearchParams(fields);
  }
  try {
    let response, told;
    try {
      response = await fetch(path, options);
    } catch {
      throw new Trouble(0, "The page's server does not answer.");
    }
    try {
      told = await response.json();
    } catch {
      throw new Trouble(0, `Something else than the page answers (${response.status}): a proxy, perhaps. Reload the page.`);
    }
    if (!response.ok) throw new Trouble(response.status, told.error || String(response.status));
    return told;
  } finally {
    clearTimeout(late);
  }
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  const mine = asked;
  try {
    const [from, show] = { why: [whyAddress, showWhy], lock: [lockAddress, showLock], list: [listAddress, showList] }[section()];
    const told = await ask(from());
    if (mine !== asked) return;
    failures = 0;
    shown(told);
    show(told);
  } catch (error) {
    if (mine !== asked) return;
    if (!(error instanceof Trouble)) throw error;
    failures += 1;
    if (error.status === 403) refuse(error.message);
    else showOld(error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, Math.min(POLL * 2 ** failures, POLL_MOST));
}

function listAddress() {
  const { search, show, order, page } = view;
  return `api/locks?${new URLSearchParams({ search, show, order, page })}`;
}

function lockAddress() {
  const { name, key, first } = view;
  return `api/lock?${new URLSearchParams(key === null ? { name, first } : { key, first })}`;
}

const whyAddress = () => `api/why?${new URLSearchParams({ id: view.why })}`;

// Which part of the page is shown.
const section = () => (view.why !== null ? "why" : view.name !== null || view.key !== null ? "lock" : "list");

// What is shown, and whether it still holds.

function shown(told) {
  seenAt = Date.now() - told.age * 1000;
  setText(byId("who"), plain(told.user) + (told.may_act ? "" : ", for reading"));
  if (isRefused) {
    isRefused = false;
    showSections();
  }
  if (told.away) {
    showOld(told.away);
  } else {
    document.documentElement.classList.remove("old");
    setText(alertBox, "");
  }
  showAge();
}

function showOld(reason) {
  document.documentElement.classList.add("old");
  setText(alertBox, seenAt === null ? plain(reason) : `What you see is old, of ${clock(seenAt)}. ${plain(reason)}`);
  showAge();
}

// Nothing that was shown stays on the screen.
function refuse(reason) {
  isRefused = true;
  seenAt = null;
  document.title = "Locks";
  if (byId("confirm").open) byId("confirm").close();
  for (const id of ["who", "server", "result"]) setText(byId(id), "");
  showOld(reason);
  showSections();
}

const isOld = () => document.documentElement.classList.contains("old");

function showAge() {
  setText(byId("age"), seenAt === null ? "" : `${isOld() ? "old, of" : "as of"} ${clock(seenAt)}`);
}

const clock = (at) => new Date(at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });

// Text.

// As words.plain() has it: what is no text, and all spaces but the usual one.
const CONTROL = /[\p{C}\p{Z}]/gu;

function plain(text) {
  return String(text).replace(CONTROL, (one) => (one === " " ? one : `\\u{${one.codePointAt(0).toString(16)}}`));
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function countOf(number, one, many) {
  return `${number.toLocaleString()} ${number === 1 ? one : many}`;
}

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A time that goes on by itself between two answers.  Below ten seconds the tenths would flicker.
function time(element, seconds, direction, before = "", after = "") {
  element.dislockTime = { at: seenAt, seconds, direction, before, after };
  showTime(element);
}

function showTime(element) {
  const { at, seconds, direction, before, after } = element.dislockTime;
  const passed = isOld() ? 0 : (Date.now() - at) / 1000;
  const now = Math.max(0, Math.round(seconds + direction * passed));
  setText(element, before + (now < 10 ? `${now} s` : duration(now)) + after);
}

function noTime(element, text = "") {
  delete element.dislockTime;
  setText(element, text);
}

setInterval(() => {
  if (document.hidden || isOld()) return;
  for (const element of document.querySelectorAll(".time")) if (element.dislockTime) showTime(element);
}, 1000);

// Bring the children in line with the items, and keep the elements of those that stay: the focus
// and a selection stay where they are.
function sync(parent, items, keyOf, create, fill) {
  const old = new Map([...parent.children].map((child) => [child.dislockKey, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = old.get(key);
    if (element) {
      old.delete(key);
    } else {
      element = create(item);
      element.dislockKey = key;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    fill(element, item);
  }
  for (const element of old.values()) element.remove();
}

// The list.

function showList(told) {
  const page = `${countOf(told.found, "lock", "locks")}${told.found === told.all ? "" : ` of ${told.all.toLocaleString()}`}`;
  const range = told.found ? `, ${(told.first + 1).toLocaleString()} to ${(told.first + told.locks.length).toLocaleString()}` : "";
  setText(byId("count"), page + range + (told.is_cut ? ". There are more than can be listed." : ""));
  setText(byId("server"), plain(told.server));
  sync(byId("locks").tBodies[0], told.locks, (lock) => lock.name, makeRow, fillRow);
  byId("locks").hidden = !told.locks.length;
  byId("empty").hidden = told.all > 0;
  byId("turn").hidden = told.pages < 2;
  byId("totals").hidden = !told.all;
  for (const button of byId("totals").children) {
    const { show } = button.dataset;
    const [number, word] = [told.totals[show], { line: "in line" }[show] || show];
    setText(button, `${number.toLocaleString()} ${word}`);
    button.setAttribute("aria-pressed", String(view.show === show));
    button.classList.toggle("warn", number > 0 && ["overdue", "paused", "damaged"].includes(show));
  }
  setText(byId("pages"), `Page ${told.page} of ${told.pages}`);
  byId("previous").disabled = told.page <= 1;
  byId("next").disabled = told.page >= told.pages;
  view.page = told.page;
  const exact = byId("exact");
  if (exact) exact.remove();
  if (!told.found && view.search) {
    const link = make("a", { id: "exact", href: address({ key: view.search }) }, `Look at the lock of key ${plain(view.search)}`);
    byId("count").append(" ", link);
  }
}

function makeRow() {
  const cell = (label, isTime) => make("td", { role: "cell", "data-label": label }, make("span", isTime ? { className: "time" } : {}));
  return make("tr", { role: "row" },
    make("th", { role: "rowheader", scope: "row" }, make("a")),
    cell("Held by"), cell("Held for", true), cell("Left", true), cell("In line"), cell("State"));
}

function fillRow(row, lock) {
  const [key, by, held, left, line, state] = [...row.cells].map((cell) => cell.firstElementChild);
  setText(key, plain(lock.key) || "(empty)");
  const to = address({ lock: lock.name });
  if (key.getAttribute("href") !== to) key.setAttribute("href", to);
  if (lock.problem) {
    setText(by, plain(lock.problem));
    noTime(held);
    noTime(left);
    setText(line, "");
    badges(state, Object.keys(lock.troubles).map((one) => [one, true]));
    return;
  }
  const [first] = lock.holders;
  const others = lock.held_by - 1;
  setText(by, first ? givenTo(first) + plain(first.who) + (others > 0 ? `, and ${others} more` : "") : "nobody");
  if (first) time(held, first.held, 1);
  else noTime(held);
  if (first) time(left, first.remaining, -1);
  else noTime(left);
  setText(line, lock.waiting ? lock.waiting.toLocaleString() : "");
  badges(state, [
    ...Object.entries(lock.troubles).filter(([one]) => one !== "limited").map(([one, since]) => [{ paused: `paused${ago(since)}`, "set aside": `${lock.aside} set aside` }[one] || one, true]),
    ...(lock.limit ? [[`limit ${lock.limit}`, true]] : []),
    ...(lock.units > lock.held_by ? [[`cost ${lock.units.toLocaleString()}`, false]] : []),
    ...(lock.rate ? rateBadges(lock.rate) : []),
    ...(first && first.expiring ? [["left to expire", false]] : []),
    ...(first && first.mode === "shared" ? [["shared", false]] : []),
    ...(lock.reservation ? [[`reserved${ago(lock.reservation.since)}`, false]] : []),
  ]);
}

// What the code says is worth a badge only while it keeps somebody from starting.
function rateBadges(rate) {
  const isSooner = rate.early > 0 && !rate.held_back;
  return [
    ...(rate.is_set ? [[`rate ${rate.words}`, true]] : []),
    ...(rate.held_back ? [[`held back ${duration(rate.held_back)}`, true]] : []),
    ...(isSooner ? [[`next in ${duration(rate.early)}`, false]] : []),
  ];
}

const ago = (seconds) => (seconds === null ? "" : ` ${duration(Math.max(1, Math.round(seconds)))} ago`);

function badges(parent, texts) {
  const items = texts.map(([text, isWarning]) => ({ text, isWarning }));
  sync(parent, items, (item) => item.text,
    (item) => make("span", { className: item.isWarning ? "badge warn" : "badge" }, item.text), () => {});
}

// One lock.

function showLock(lock) {
  lastLock = lock;
  byId("lock-told").hidden = false;
  const title = `Lock ${plain(lock.key)}`;
  setText(byId("lock-title"), title);
  document.title = title;
  const told = [];
  if (!lock.exists) told.push("The lock server knows nothing of it: nobody holds it, and nobody waits.");
  if (lock.limit !== null) {
    const until = lasting(lock.limit_remaining);
    const why = inBrackets(lock.limit_note);
    told.push(lock.limit === 0 ? `It is paused, ${until}${why}: nobody gets it.` : `It admits ${lock.limit.toLocaleString()} at a time, ${until}${why}.`);
  }
  if (lock.rate) told.push(...rateTold(lock.rate));
  told.push(...lock.told.map(plain));
  setText(byId("lock-text"), told.join(" "));
  byId("limits").hidden = !lock.may_act;
  byId("pause").hidden = lock.limit === 0;
  byId("resume").hidden = lock.limit === null;
  byId("unrate").hidden = !lock.rate || lock.rate.since === null;
  setText(byId("unrate"), lock.rate && lock.rate.is_set ? "Take back the rate" : "End the hold-back");
  setText(byId("resume"), lock.limit === 0 ? "Resume" : "Take back the limit");
  byId("no-holders").hidden = lock.holders.length > 0;
  sync(byId("holders"), lock.holders, (one) => `${one.token} ${one.owner || one.who}`, makeHolder, fillHolder);
  const reserved = lock.reservation;
  byId("reserved").hidden = !reserved;
  if (reserved) {
    setText(byId("reservation"), `${reservedFor(reserved)} It ends in ${duration(reserved.remaining)}${reserved.state === "ended" ? "" : ", unless it is renewed"}.`);
    byId("unreserve").hidden = !lock.may_act;
  }
  byId("with-turns").hidden = !lock.turns.length;
  sync(byId("turns"), lock.turns, (one) => one.ticket, makePlace, fillPlace);
  setText(byId("line-text"), lock.waiting ? `${countOf(lock.waiting, "waits", "wait")}.` : "Nobody waits.");
  sync(byId("line"), lock.line, (one) => `${one.ticket} ${one.ticket ? "" : `${one.place} ${one.who}`}`, makePlace, fillPlace);
  byId("line-pages").hidden = lock.waiting <= lock.places && !lock.first;
  byId("line-previous").disabled = !lock.first;
  byId("line-next").disabled = lock.first + lock.line.length >= lock.waiting;
}

const lasting = (remaining) => (remaining === null ? "until that is taken back" : `for ${duration(remaining)} more`);
const inBrackets = (note) => (note ? ` (${plain(note)})` : "");

function rateTold(rate) {
  const told = [];
  if (rate.words) {
    const until = rate.is_set ? `, ${lasting(rate.remaining)}${inBrackets(rate.note)}` : "";
    const next = rate.early > 0 && !rate.held_back ? `; the next may start in ${duration(rate.early)}` : "";
    told.push(`Its rate is ${rate.words}${until}${next}.`);
  }
  if (rate.held_back) told.push(`It is held back for ${duration(rate.held_back)} more${inBrackets(rate.back_note)}: nobody gets it.`);
  return told;
}

function reservedFor(reserved) {
  const since = `${duration(reserved.since)} ago`;
  if (reserved.state === "ended") return `For task ${plain(reserved.id)}, which ended ${since}.`;
  return `For task ${plain(reserved.id)}, ${since}; it is ${reserved.state}.`;
}

function makeHolder() {
  const end = make("button", { type: "button", className: "danger", hidden: true }, "End the task");
  const button = make("button", { type: "button", className: "danger", hidden: true }, "Free");
  const item = make("li", {},
    make("div", { className: "told" }, make("strong"), make("span", { className: "more" },
      make("span", { className: "time" }), make("span", { className: "time" }), make("span", { className: "time" }), make("span"))),
    end, button);
  end.addEventListener("click", () => terminate(item.dislockHolder, end));
  button.addEventListener("click", () => free(item.dislockHolder, button));
  return item;
}

const givenTo = (holder) => (holder.waits ? "kept for " : holder.turn ? "given to " : "");

function fillHolder(item, holder) {
  item.dislockHolder = holder;
  setText(item.querySelector("strong"), givenTo(holder) + plain(holder.who));
  const [held, renewed, left, more] = item.querySelector(".more").children;
  time(held, holder.held, 1, holder.waits ? "for " : "held for ", ", ");
  if (holder.renewed === null) noTime(renewed);
  else time(renewed, holder.renewed, 1, "renewed ", " ago, ");
  time(left, holder.remaining, -1, "", holder.expiring || holder.renewed === null ? " left, " : " left unless renewed again, ");
  const place = [holder.host ? `host ${plain(holder.host)}` : "", holder.pid ? `pid ${holder.pid}` : ""].filter(Boolean).join(", ");
  const newer = holder.superseded ? `newer task ${plain(holder.superseded)} waits for this one to end` : "";
  const spent = holder.spent === null ? "" : `, spent ${holder.spent.toLocaleString()}`;
  const cost = spent || holder.cost > 1 ? `cost ${holder.cost.toLocaleString()}${spent}` : "";
  setText(more, [`${holder.mode}${holder.expiring ? ", left to expire" : ""}`, cost, place, `token ${holder.token}`, newer].filter(Boolean).join(", "));
  const [end, button] = item.querySelectorAll("button");
  button.hidden = !lastLock.may_act;
  button.setAttribute("aria-label", `Free the lock of ${plain(holder.who)}`);
  end.hidden = button.hidden || !holder.can_be_terminated;
  end.setAttribute("aria-label", `End the task ${plain(holder.who)}`);
}

function makePlace() {
  const button = make("button", { type: "button", className: "danger", hidden: true }, "Drop");
  const item = make("li", {},
    make("div", { className: "told" }, make("strong"), make("span", { className: "more" }, make("span", { className: "time" }), make("span"))),
    button);
  button.addEventListener("click", () => drop(item.dislockPlace, button));
  return item;
}

function fillPlace(item, place) {
  item.dislockPlace = place;
  setText(item.querySelector("strong"), `${place.place ? `${place.place}. ` : ""}${plain(place.who)}`);
  const [waiting, more] = item.querySelector(".more").children;
  time(waiting, place.waiting, 1, "waiting for ");
  setText(more, [
    "",
    place.parked ? "parked" : "in its slot",
    place.mode === "shared" ? "shared" : "",
    place.cost > 1 ? `cost ${place.cost.toLocaleString()}` : "",
    place.stations.length && place.place ? `lock ${place.keeps.length + 1} of ${place.stations.length}` : "",
    place.keeps.length ? `keeps ${plain(place.keeps.join(", "))}` : "",
    place.turns ? countOf(place.turns, "turn", "turns") : "",
    place.args ? plain(place.args) : "",
  ].filter((text, nth) => text || !nth).join(", "));
  const button = item.querySelector("button");
  button.hidden = !(lastLock.may_act && place.parked);
  button.setAttribute("aria-label", `Drop ${plain(place.who)} from the line`);
}

// Why a task does not run.

function showWhy(told) {
  byId("why-told").hidden = false;
  setText(byId("why-sentence"), plain(told.sentence));
  setText(byId("why-remedy"), plain(told.remedy));
  sync(byId("why-facts"), told.rests_on.map((text, nth) => ({ text, nth })), (one) => one.nth, () => make("li"), (item, one) => setText(item, plain(one.text)));
  const link = byId("why-lock");
  link.parentElement.hidden = told.key === null;
  if (told.key === null) return;
  setText(link, `Lock ${plain(told.key)}`);
  link.setAttribute("href", address({ key: told.key }));
}

// Actions.

function confirmed(title, text, button) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirmed"), button);
  answer(false); // who opens a dialog again has closed the one before, though its event may be still to come
  dialog.returnValue = "";
  dialog.showModal();
  byId("cancel").focus();
  return new Promise((resolve) => {
    answer = resolve;
  });
}

async function act(path, fields) {
  try {
    const told = await ask(path, fields);
    setText(byId("result"), plain(told.text));
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    const isUnsure = error.status === 0 || error.status >= 500;
    setText(byId("result"), `${plain(error.message)}${isUnsure ? " It may have been done all the same: look again." : " Nothing was changed."}`);
  }
  asked += 1;
  await poll();
}

// The holder is the one that the question shows, whoever holds the lock when the answer is given.
async function free(holder, button) {
  const lock = lastLock;
  const first = holder.can_be_terminated ? "End the task first, with the other button: then nothing runs twice. " : "";
  const goesOn = holder.waits
    ? "It gives back all that it keeps, and waits anew."
    : "Its body may still run: it is told that its lease is lost, and the next in line gets the lock.";
  const text = `${first}${plain(holder.who)} holds it for ${duration(holder.held)}. ${goesOn}`;
  if (await confirmed(`Free lock ${plain(lock.key)}?`, text, "Free it")) {
    await act("api/free", { name: lock.name, owner: holder.owner, token: holder.token });
  }
  refocus(button);
}

async function unreserve() {
  const lock = lastLock;
  const { id, mark, number, state } = lock.reservation;
  const goesOn = { running: "Its task goes on.", ended: "Its task has ended." }[state] || "Its message may still wait, and runs then as well.";
  const text = `${reservedFor(lock.reservation)} The next message of the key is sent. ${goesOn}`;
  if (await confirmed(`End the reservation of ${plain(lock.key)}?`, text, "End it")) {
    await act("api/unreserve", { name: lock.name, id, mark, number });
  }
  if (byId("reserved").hidden) byId("lock-title").focus();
}

async function terminate(holder, button) {
  const lock = lastLock;
  const text = `${plain(holder.who)} is revoked, and its process gets SIGTERM. Its lock is released when it has ended.`;
  if (await confirmed("End this task?", text, "End it")) {
    await act("api/terminate", { name: lock.name, owner: holder.owner, token: holder.token });
  }
  refocus(button);
}

async function drop(place, button) {
  const lock = lastLock;
  const text = `${plain(place.who)} does not run, and its result is REVOKED.`;
  if (await confirmed("Drop this task?", text, "Drop it")) {
    await act("api/drop", { name: lock.name, ticket: place.ticket, beside: place.beside });
  }
  refocus(button);
}

async function limit(what, title, text, button) {
  const lock = lastLock;
  if (await confirmed(title, text, button)) {
    await act("rate" in what ? "api/rate" : "api/limit", { name: lock.name, ...what, why: byId("why").value });
  }
}

// The focus has gone with the button that was pressed.
function refocus(button) {
  if (!button.isConnected) byId("lock-title").focus();
}

byId("confirm").addEventListener("close", ({ target }) => {
  if (!target.open) answer(target.returnValue === "yes");
});
byId("cancel").addEventListener("click", () => byId("confirm").close());
byId("confirmed").addEventListener("click", () => byId("confirm").close("yes"));
byId("unreserve").addEventListener("click", unreserve);
byId("pause").addEventListener("click", () => {
  const text = lastLock.ticked === null
    ? "Nobody gets it from now on. Those who hold it keep it, and those in line stay there."
    : "No beat sends anything from now on, the one that leads included.";
  limit({ limit: "0" }, `Pause lock ${plain(lastLock.key)}?`, text, "Pause it");
});
byId("resume").addEventListener("click", () => limit({ limit: "" }, `Take back the limit of lock ${plain(lastLock.key)}?`, "The limit that the code gives holds again.", "Take it back"));
byId("limit").addEventListener("submit", (event) => {
  event.preventDefault();
  const leases = byId("leases").value;
  limit({ limit: leases }, `Limit lock ${plain(lastLock.key)}?`, `At most ${leases} at a time get it from now on, whatever the code says, until that is taken back.`, "Limit it");
});
byId("unrate").addEventListener("click", () => limit({ rate: "" }, `Take back the rate of lock ${plain(lastLock.key)}?`, "The rate that the code gives holds again, and it is not held back any more.", "Take it back"));
byId("rate").addEventListener("submit", (event) => {
  event.preventDefault();
  const rate = byId("starts").value;
  limit({ rate }, `Set the rate of lock ${plain(lastLock.key)}?`, `It is taken ${plain(rate)} at most from now on, whatever the code says, until that is taken back.`, "Set it");
});

// Where one is.

function address(parts) {
  return `#${new URLSearchParams(parts)}`;
}

function go() {
  const parts = new URLSearchParams(location.hash.slice(1));
  view = {
    why: parts.get("why"),
    name: parts.get("lock"),
    key: parts.get("key"),
    first: parts.get("first") || "0",
    search: parts.get("search") || "",
    show: parts.get("show") || "all",
    order: parts.get("order") || "trouble",
    page: parts.get("page") || "1",
  };
  asked += 1;
  failures = 0;
  if (document.activeElement !== byId("search")) byId("search").value = view.search;
  byId("show").value = view.show;
  byId("order").value = view.order;
  if (section() !== "lock") document.title = "Locks";
  if (view.why !== null) setText(byId("why-title"), `Task ${plain(view.why)}`);
  showSections();
  poll();
}

function showSections() {
  for (const one of ["list", "lock", "why"]) byId(`${one}-view`).hidden = isRefused || section() !== one;
}

function list(changes) {
  const parts = { search: view.search, show: view.show, order: view.order, page: view.page, ...changes };
  const standard = { search: "", show: "all", order: "trouble", page: "1" };
  return Object.fromEntries(Object.entries(parts).filter(([name, value]) => String(value) !== standard[name]));
}

function find(changes, replaces) {
  const to = address(list({ page: 1, ...changes }));
  if (replaces) {
    history.replaceState(null, "", to);
    go();
  } else {
    location.hash = to;
  }
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(searchTimer);
  find({ search: byId("search").value }, true);
});
byId("search").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => find({ search: byId("search").value }, true), TYPING);
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = address({ why: byId("task").value.trim() });
});
byId("show").addEventListener("change", () => find({ show: byId("show").value }));
byId("totals").addEventListener("click", (event) => {
  const { show } = event.target.dataset;
  if (show) find({ show: view.show === show ? "all" : show });
});
byId("order").addEventListener("change", () => find({ order: byId("order").value }));
byId("previous").addEventListener("click", () => find({ page: Number(view.page) - 1 }));
byId("next").addEventListener("click", () => find({ page: Number(view.page) + 1 }));
for (const [id, step] of [["line-previous", -1], ["line-next", 1]]) {
  byId(id).addEventListener("click", () => {
    const first = Math.max(0, Number(view.first) + step * lastLock.places);
    location.hash = address({ ...(view.key !== null ? { key: view.key } : { lock: view.name }), first });
  });
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});

window.addEventListener("hashchange", () => {
  const was = view;
  go();
  setText(byId("result"), "");
  if (was.name !== view.name || was.key !== view.key || was.why !== view.why) {
    lastLock = null;
    byId("lock-told").hidden = byId("why-told").hidden = true;
    if (section() === "lock") setText(byId("lock-title"), "Lock");
    byId({ lock: "lock-title", why: "why-title", list: "main" }[section()]).focus();
  }
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  failures = 0;
  poll();
});
window.addEventListener("online", () => poll());

go();
