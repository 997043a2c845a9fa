package main

import (
	"fmt"
	"hash/fnv"
	"strings"

	"github.com/anishathalye/porcupine"
)

// state is all that the model knows of a sale at one instant: a letter per reservation of the world, and then one per
// payment. What is available, and what a buyer has, follows from it.
type state string

// The letters. A reservation or payment is absent until it is granted or takes effect; a payment is on file ever after.
const (
	absent    = '.'
	held      = 'H'
	confirmed = 'C'
	released  = 'R'
	expired   = 'E'
	restocked = 'F' // refunded, and its units are for sale again
	withheld  = 'W' // refunded, and its units are not
	onFile    = 'P'

	sold   = string(confirmed) + string(restocked) + string(withheld) // a payment had it for good
	bought = string(confirmed) + string(withheld)                     // counts against the buyer's limit
)

// letters are the states that an answer can mean. It does not say what became of a refunded reservation's units.
var letters = map[string]string{"held": string(held), "confirmed": string(confirmed), "released": string(released),
	"expired": string(expired), "refunded": string(restocked) + string(withheld)}

// world is what stays the same during a history: the sale, and the reservations and payments that there will be.
type world struct {
	units, limit int
	reservations []reservation
	payments     []payment
}

type reservation struct {
	id, buyer string
	quantity  int
	lapses    int64 // the earliest instant at which its time may be over
}

type payment struct {
	id          string
	reservation string
	due         string // why it is to be refunded; "" when it bought the reservation
}

// deed is what somebody did, or found, between two instants of a history.
type deed struct {
	do          string // see step
	buyer       string
	quantity    int
	reservation int    // index in the world; -1 without one
	id          string // of the reservation
	payment     string
	place       int // of the payment in a state
	restock     bool
	latest      int64 // when it was over at the latest, to judge what may have lapsed
	over        bool  // the sale may have ended by then
	looked      bool  // it rests on what was seen, without a lock, before the rows' instant
	again       bool  // the same request was made before: its answer may be told again
	// batch are reservations that the same pod granted meanwhile, perhaps in the same transaction: their units were taken
	// when the shelf was looked at, and shown as taken a moment later.
	batch []int
	rows  state
}

// Answers that are not HTTP's. What the rows say was done, and what may have been done, which they do not say.
const (
	done    = "done"
	unknown = "unknown"
)

func (w *world) model() porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{w.nothing()} },
		Step: func(s, in, out any) []any {
			var next []any
			for _, n := range w.step(s.(state), in.(deed), out.(string)) {
				next = append(next, n)
			}
			return next
		},
		Hash: func(s any) uint64 {
			h := fnv.New64a()
			_, _ = h.Write([]byte(s.(state)))
			return h.Sum64()
		},
		DescribeOperation: func(in, out any) string { return in.(deed).String() + " → " + out.(string) },
		DescribeState:     func(s any) string { return string(s.(state)) },
	}
	return m.ToModel()
}

func (d deed) String() string {
	var b strings.Builder
	b.WriteString(d.do)
	for _, part := range []string{d.buyer, short(d.id), d.payment} {
		if part != "" {
			b.WriteString(" " + part)
		}
	}
	if d.quantity > 0 {
		fmt.Fprintf(&b, " ×%d", d.quantity)
	}
	if d.rows != "" {
		b.WriteString(" " + string(d.rows))
	}
	return b.String()
}

// short is the end of an id, which is random where its beginning is a time.
func short(id string) string { return id[max(0, len(id)-6):] }

func (w *world) nothing() state {
	return state(strings.Repeat(string(absent), len(w.reservations)+len(w.payments)))
}

func (s state) with(place int, letter byte) state {
	b := []byte(s)
	b[place] = letter
	return state(b)
}

func in(letters string, letter byte) bool { return strings.IndexByte(letters, letter) >= 0 }

// count adds up the units of the reservations that are in one of the states.
func (w *world) count(s state, states string, of func(*reservation) bool) int {
	n := 0
	for i := range w.reservations {
		if r := &w.reservations[i]; in(states, s[i]) && of(r) {
			n += r.quantity
		}
	}
	return n
}

func (w *world) held(s state) int {
	return w.count(s, string(held), func(*reservation) bool { return true })
}

func (w *world) available(s state) int {
	return w.units - w.count(s, string(held)+bought, func(*reservation) bool { return true })
}

// bought is what a buyer has for good, and live what he holds for sure: a hold whose time may be over by the instant, swept or
// not, is left out.
func (w *world) bought(s state, buyer string) int {
	return w.count(s, bought, func(r *reservation) bool { return r.buyer == buyer })
}

func (w *world) live(s state, buyer string, latest int64) int {
	return w.count(s, string(held), func(r *reservation) bool { return r.buyer == buyer && r.lapses > latest })
}

// step gives the states that the sale can be in after a deed with this answer; none, if it cannot be answered so.
func (w *world) step(s state, d deed, answer string) []state {
	yes := func(ok bool) []state {
		if ok {
			return []state{s}
		}
		return nil
	}
	// move is for deeds that take a reservation from a state to another.
	move := func(from, to byte) []state {
		switch now := s[d.reservation]; {
		case now == from && answer == unknown:
			return []state{s, s.with(d.reservation, to)}
		case now == from && (answer == done || in(letters[answer], to)):
			return []state{s.with(d.reservation, to)}
		}
		return yes(answer == unknown || answer != done && w.is(s, d, answer))
	}
	switch d.do {
	case "reserve":
		return w.reserve(s, d, answer)
	case "nothing held": // by a buyer who was refused
		return yes(w.live(s, d.buyer, d.latest) == 0)
	case "shelf": // what a refusal says of it
		inFlight := 0
		for _, b := range d.batch {
			if s[b] == absent {
				inFlight += w.reservations[b].quantity
			}
		}
		enough := w.available(s)+w.held(s) >= d.quantity
		return yes(answer == "sold-out" && !enough || answer == "all-held" && enough && w.available(s)-inFlight < d.quantity)
	case "read":
		return yes(w.is(s, d, answer))
	case "release":
		if answer == "confirmed" { // which refuses it, also for refunded ones
			return yes(in(sold, s[d.reservation]))
		}
		return move(held, released)
	case "confirm":
		if answer == done {
			return w.settle(s, d)
		}
		return yes(w.paid(s, d, answer))
	case "refund":
		switch {
		case answer == done && d.restock:
			return move(confirmed, restocked)
		case answer == done:
			return move(confirmed, withheld)
		case answer == "refund_due":
			return yes(!in(sold, s[d.reservation]) && w.dueOnFile(s, d.id))
		case answer == "not-confirmed":
			return yes(!in(sold, s[d.reservation]) && !w.dueOnFile(s, d.id))
		}
		return yes(answer == "refunded" && w.is(s, d, answer))
	case "expire":
		return move(held, expired)
	case "rows":
		return yes(s == d.rows)
	}
	return nil
}

// is says whether an answer tells the reservation's state. A hold past its time is told as expired before it is swept.
func (w *world) is(s state, d deed, answer string) bool {
	return in(letters[answer], s[d.reservation]) || answer == "expired" && w.lapsed(s, d)
}

func (w *world) lapsed(s state, d deed) bool {
	return s[d.reservation] == held && w.reservations[d.reservation].lapses <= d.latest
}

func (w *world) dueOnFile(s state, reservation string) bool {
	for i, p := range w.payments {
		if p.reservation == reservation && p.due != "" && s[len(w.reservations)+i] == onFile {
			return true
		}
	}
	return false
}

func (w *world) reserve(s state, d deed, answer string) []state {
	var ok bool
	switch answer {
	case "granted", done:
		r := w.reservations[d.reservation]
		if s[d.reservation] == absent && r.buyer == d.buyer && r.quantity == d.quantity && w.available(s) >= d.quantity &&
			w.live(s, d.buyer, d.latest) == 0 && w.bought(s, d.buyer)+d.quantity <= w.limit {
			return []state{s.with(d.reservation, held)}
		}
		return nil
	case "limit":
		ok = w.live(s, d.buyer, d.latest) == 0 && w.bought(s, d.buyer)+d.quantity > w.limit
	default: // told of a reservation that was there: the live one, or what became of the one this request was given before
		ok = d.reservation >= 0 && w.is(s, d, answer) && w.reservations[d.reservation].buyer == d.buyer && (answer == "held" || d.again)
	}
	if ok {
		return []state{s}
	}
	return nil
}

// paid says whether the answer to a payment is right: that on file, or why the payment cannot be.
func (w *world) paid(s state, d deed, answer string) bool {
	var now byte = absent
	if d.reservation >= 0 {
		now = s[d.reservation]
	}
	for i, p := range w.payments {
		if p.id != d.payment || s[len(w.reservations)+i] != onFile {
			continue
		}
		switch {
		case p.reservation != d.id:
			return answer == "payment-reused"
		case p.due != "":
			return answer == "refund_due"
		}
		return in(sold, now) && w.is(s, d, answer)
	}
	return answer == "payment-mismatch" && in(sold, now)
}

// settle puts a payment on file: it buys the reservation, also one that has ended, if it still can; else it is to be refunded.
func (w *world) settle(s state, d deed) []state {
	due := w.payments[d.place-len(w.reservations)].due
	next := s.with(d.place, onFile)
	if d.reservation < 0 || s[d.reservation] == absent {
		if due == "unknown-reservation" {
			return []state{next}
		}
		return nil
	}
	r, now := w.reservations[d.reservation], s[d.reservation]
	ended := now == expired || now == released
	late := ended || w.lapsed(s, d)
	// A hold that may have lapsed may have been live still when the buyer was looked at.
	least, most := w.bought(s, r.buyer)+w.live(s, r.buyer, d.latest), w.bought(s, r.buyer)+w.live(s, r.buyer, 0)
	var ok bool
	switch due {
	case "":
		ok = now == held || ended && least+r.quantity <= w.limit && w.available(s) >= r.quantity
		next = next.with(d.reservation, confirmed)
	case "sale-over":
		ok = late && d.over
	case "limit":
		ok = late && most+r.quantity > w.limit
	case "sold-out":
		ok = ended && w.available(s) < r.quantity
	}
	if ok {
		return []state{next}
	}
	return nil
}
