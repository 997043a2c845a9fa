package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// call is one HTTP request of a round and its answer. Times are nanoseconds of the harness's monotonic clock.
type call struct {
	Client       int
	Pod          int
	Do           string // reserve, read, release, confirm, refund
	Buyer        string // "" when the checkout calls
	Quantity     int
	Key          string // idempotency key
	Reservation  string // that the call is about, or that it was answered
	Payment      string
	Restock      bool
	Began, Ended int64
	// Answer is "granted", or the state of the reservation in lower case, or the word of the problem; "lost" when there was
	// none, "refused" when nobody listened.
	Answer string
}

// undecided answers do not say whether the call took effect.
func (c *call) undecided() bool { return c.Answer == "busy" || c.Answer == "lost" }

func (c *call) told() bool {
	return c.Do == "reserve" && (c.Answer == "granted" || letters[c.Answer] != "")
}

func (c *call) String() string {
	d := deed{do: c.Do, buyer: c.Buyer, id: c.Reservation, payment: c.Payment, quantity: c.Quantity}
	s := fmt.Sprintf("%8.3f to %8.3f s  client %2d, pod %d: %s", seconds(c.Began), seconds(c.Ended), c.Client, c.Pod, d)
	if c.Key != "" {
		s += " key " + c.Key
	}
	if c.Do == "refund" {
		s += fmt.Sprintf(" restock %t", c.Restock)
	}
	return s + " → " + c.Answer
}

func seconds(ns int64) float64 { return time.Duration(ns).Seconds() }

// history is what a round leaves behind.
type history struct {
	units, limit int
	calls        []call
	rows         []reservationRow
	ledger       []ledgerRow
	clock        clock
	endsAt       time.Time // of the sale, by the database's clock; zero without an end
	end          int64     // when the rows were read
}

// deeds turns a history into what the model judges: what the rows say was done, from the instant that they name, and what the
// calls were answered. So a call of unknown outcome need not be guessed at: a claim that nobody was told of took effect if its
// row is there. Only what later deeds have overwritten in the rows is left open.
//
// lag is how long a refusal from a pod's memory may be behind the rows: of the shelf, and of what another pod granted the buyer.
func (h *history) deeds(lag time.Duration) (*world, []porcupine.Operation, error) {
	w := &world{units: h.units, limit: h.limit}
	index := map[string]int{}
	rows := []byte{}
	for i, r := range h.rows {
		index[r.id] = i
		w.reservations = append(w.reservations, reservation{id: r.id, buyer: r.buyer, quantity: r.quantity, lapses: h.clock.earliest(r.expiresAt)})
		rows = append(rows, r.letter)
	}
	for _, p := range h.ledger {
		w.payments = append(w.payments, payment{id: p.payment, reservation: p.reservation, due: p.due})
		rows = append(rows, onFile)
	}
	var ops []porcupine.Operation
	add := func(client int, d deed, answer string, began, ended int64) {
		if d.latest == 0 {
			d.latest = ended
		}
		d.over = !h.endsAt.IsZero() && h.clock.earliest(h.endsAt) <= d.latest
		ops = append(ops, porcupine.Operation{ClientId: client, Input: d, Call: min(began, ended), Output: answer, Return: ended})
	}
	database := 0 // the client that the rows speak for
	for i := range h.calls {
		database = max(database, h.calls[i].Client+1)
	}
	// did adds what a row says, and makes sure that somebody asked for it. It was done when the first one was told so.
	did := func(d deed, stamp time.Time, asked, told func(c *call) bool) error {
		d.latest = h.clock.latest(stamp)
		began, ended, anyone := h.clock.earliest(stamp), h.end, asked == nil
		for i := range h.calls {
			c := &h.calls[i]
			if asked != nil && c.Do == d.do && c.Began <= d.latest && asked(c) {
				anyone = true
				if d.looked {
					began = min(began, c.Began)
				}
			}
			if told != nil && told(c) && (letters[c.Answer] != "" || c.Answer == "refund_due") {
				ended = min(ended, c.Ended)
			}
		}
		if !anyone {
			return fmt.Errorf("the rows say that this was done, but nobody asked for it: %s", d)
		}
		add(database, d, done, began, ended)
		return nil
	}
	var errs []error
	granted := map[string]bool{}
	for i := range h.calls {
		c := h.calls[i]
		d := deed{do: c.Do, buyer: c.Buyer, quantity: c.Quantity, reservation: -1, id: c.Reservation, payment: c.Payment}
		var r reservationRow
		if at, ok := index[c.Reservation]; ok {
			d.reservation, r = at, h.rows[at]
		} else if c.told() || c.Do != "reserve" && c.Do != "confirm" {
			return nil, nil, fmt.Errorf("no row of the reservation in: %s", &c)
		}
		late := c.Do == "release" && in(sold, r.letter) // what the release did, the payment has overwritten
		switch {
		case c.undecided() && late:
			add(c.Client, d, unknown, c.Began, h.end)
		case c.undecided(), c.Answer == "refused", c.Answer == "key-reused": // see keys
		case c.Do == "release" && !late && letters[c.Answer] != "" && c.Answer != "confirmed":
			d.do = "read"
			add(c.Client, d, c.Answer, c.Began, c.Ended)
		case c.Answer == "granted":
			granted[c.Reservation] = true
			d.latest = h.clock.latest(r.grantedAt)
			add(c.Client, d, c.Answer, max(c.Began, h.clock.earliest(r.grantedAt)), c.Ended)
		case c.Answer == "sold-out" || c.Answer == "all-held" || c.Answer == "closed":
			add(c.Client, deed{do: "nothing held", buyer: c.Buyer, reservation: -1}, "", c.Began-lag.Nanoseconds(), c.Ended)
			if c.Answer != "closed" {
				d.do, d.batch = "shelf", h.batch(&c, index)
				add(c.Client, d, c.Answer, c.Began-lag.Nanoseconds(), c.Ended)
			}
		default:
			d.again = c.Key != "" && slices.ContainsFunc(h.calls, func(o call) bool {
				return o.Do == "reserve" && o.Key == c.Key && o.Began < c.Ended && (o.Began != c.Began || o.Client != c.Client)
			})
			add(c.Client, d, c.Answer, c.Began, c.Ended)
		}
	}
	for i, r := range h.rows {
		d := deed{reservation: i, id: r.id}
		of := func(c *call) bool { return c.Reservation == r.id }
		do := func(c *call) bool { return of(c) && c.Do == d.do }
		if !granted[r.id] {
			claim := deed{do: "reserve", buyer: r.buyer, quantity: r.quantity, reservation: i, id: r.id}
			errs = append(errs, did(claim, r.grantedAt, func(c *call) bool { return c.undecided() && c.Buyer == r.buyer && c.Quantity == r.quantity }, of))
		}
		switch r.letter {
		case expired:
			d.do = "expire"
			errs = append(errs, did(d, r.changedAt, nil, nil))
		case released:
			d.do = "release"
			errs = append(errs, did(d, r.changedAt, of, do))
		case restocked, withheld:
			d.do, d.restock = "refund", r.letter == restocked
			// Told "refund_due" is who asked for a payment that had not sold it.
			told := func(c *call) bool { return do(c) && c.Answer == "refunded" }
			errs = append(errs, did(d, r.changedAt, func(c *call) bool { return of(c) && c.Restock == d.restock }, told))
		}
	}
	for i, p := range h.ledger {
		d := deed{do: "confirm", payment: p.payment, place: len(h.rows) + i, id: p.reservation, reservation: -1, looked: p.due != ""}
		if at, ok := index[p.reservation]; ok {
			d.reservation = at
			if r := h.rows[at]; p.due == "" && p.recordedAt.After(r.expiresAt) {
				add(database, deed{do: "expire", reservation: at, id: r.id}, unknown, h.clock.earliest(r.expiresAt), h.end)
			}
		}
		paid := func(c *call) bool { return c.Reservation == p.reservation && c.Payment == p.payment }
		errs = append(errs, did(d, p.recordedAt, paid, paid))
	}
	add(database, deed{do: "rows", reservation: -1, rows: state(rows)}, "", h.end+1, h.end+2)
	return w, ops, errors.Join(errs...)
}

// batch are the reservations that the pod granted while it refused c.
func (h *history) batch(c *call, index map[string]int) []int {
	var batch []int
	for _, o := range h.calls {
		if o.Answer == "granted" && o.Pod == c.Pod && o.Began <= c.Ended && c.Began <= o.Ended {
			batch = append(batch, index[o.Reservation])
		}
	}
	return batch
}

// verdict is what the checker says of a history, with what it needs to draw a picture.
type verdict struct {
	porcupine.CheckResult
	info  porcupine.LinearizationInfo
	model porcupine.Model
}

// check says whether the history is linearizable. Refusals may be a second behind (and a moment, for the instant is measured
// elsewhere), so that many overlap, and showing that no order fits all of them at once could take for ever. What is illegal
// without them, or with one of them, is illegal with all; what is legal when they may be less behind, is legal when they may
// be more. So the quick questions come first.
func (h *history) check(patience time.Duration) (verdict, error) {
	const little, most = 200 * time.Millisecond, 1100 * time.Millisecond
	w, near, err := h.deeds(little)
	if err != nil {
		return verdict{CheckResult: porcupine.Illegal}, err
	}
	_, all, err := h.deeds(most)
	if err != nil {
		return verdict{CheckResult: porcupine.Illegal}, err
	}
	ask := func(ops []porcupine.Operation, patience time.Duration) verdict {
		v := verdict{model: w.model()}
		v.CheckResult, v.info = porcupine.CheckOperationsVerbose(v.model, ops, patience)
		return v
	}
	refusal := func(op porcupine.Operation) bool { return op.Input.(deed).do == "shelf" }
	others := slices.DeleteFunc(slices.Clone(all), refusal)
	if v := ask(others, patience); v.CheckResult != porcupine.Ok {
		return v, nil
	}
	if v := ask(near, patience/20); v.CheckResult == porcupine.Ok {
		return v, nil
	}
	deadline := time.Now().Add(patience)
	for _, op := range all {
		if refusal(op) && time.Now().Before(deadline) {
			if v := ask(append(slices.Clip(others), op), patience/20); v.CheckResult == porcupine.Illegal {
				return v, nil
			}
		}
	}
	return ask(all, patience), nil
}

// promises checks one by one what was told against the rows. The model would find it as well, but could not name it.
func (h *history) promises() []string {
	var broken []string
	rows := map[string]reservationRow{}
	for _, r := range h.rows {
		rows[r.id] = r
	}
	paid := map[string]ledgerRow{}
	for _, p := range h.ledger {
		paid[p.payment] = p
	}
	for i := range h.calls {
		c := &h.calls[i]
		r, there := rows[c.Reservation]
		switch {
		case c.told() && (!there || r.buyer != c.Buyer):
			broken = append(broken, "no such row: "+c.String())
		case c.Answer == "granted" && r.quantity != c.Quantity:
			broken = append(broken, fmt.Sprintf("the row has quantity %d: %s", r.quantity, c))
		case c.Do == "confirm" && c.Answer == "confirmed" && (paid[c.Payment].reservation != c.Reservation || paid[c.Payment].due != "" || !in(sold, r.letter)):
			broken = append(broken, "the payment did not buy it: "+c.String())
		case c.Do == "confirm" && c.Answer == "refund_due" && (paid[c.Payment].reservation != c.Reservation || paid[c.Payment].due == ""):
			broken = append(broken, "no refund is on file: "+c.String())
		case c.Answer == "closed" && (h.endsAt.IsZero() || h.clock.earliest(h.endsAt) > c.Ended):
			broken = append(broken, "closed before its end: "+c.String())
		}
	}
	return append(broken, h.keys()...)
}

// keys checks idempotency keys: the same request gets the same reservation for ever, another one is told that it may not
// use the key.
func (h *history) keys() []string {
	var broken []string
	byKey := map[string][]*call{}
	for i := range h.calls {
		if c := &h.calls[i]; c.Key != "" {
			byKey[c.Key] = append(byKey[c.Key], c)
		}
	}
	for _, calls := range byKey {
		slices.SortFunc(calls, func(a, b *call) int { return cmp.Compare(a.Began, b.Began) })
		for i, c := range calls {
			for _, before := range calls[:i] {
				if !before.told() || before.Ended >= c.Began || c.undecided() || c.Answer == "refused" {
					continue
				}
				same := c.Quantity == before.Quantity
				if same && c.Reservation != before.Reservation || !same && c.Answer != "key-reused" {
					broken = append(broken, fmt.Sprintf("the key was given %s before: %s", short(before.Reservation), c))
				}
			}
			if c.Answer == "key-reused" && !slices.ContainsFunc(calls, func(o *call) bool {
				return o.Quantity != c.Quantity && o.Began < c.Ended && (o.told() || o.undecided())
			}) {
				broken = append(broken, "nobody used the key before: "+c.String())
			}
		}
	}
	return broken
}

// text lists the calls in the order of their beginning.
func (h *history) text() string {
	calls := slices.SortedFunc(slices.Values(h.calls), func(a, b call) int { return cmp.Compare(a.Began, b.Began) })
	var b strings.Builder
	for i := range calls {
		fmt.Fprintln(&b, &calls[i])
	}
	for _, r := range h.rows {
		fmt.Fprintf(&b, "row: %s %s ×%d %c, granted %.3f, expires %.3f\n", r.id, r.buyer, r.quantity, r.letter,
			seconds(h.clock.earliest(r.grantedAt)), seconds(h.clock.earliest(r.expiresAt)))
	}
	for _, p := range h.ledger {
		fmt.Fprintf(&b, "ledger: %s for %s, due %q, at %.3f\n", p.payment, p.reservation, p.due, seconds(h.clock.earliest(p.recordedAt)))
	}
	return b.String()
}
