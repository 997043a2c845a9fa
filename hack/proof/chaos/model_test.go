package main

import (
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// at is a time of a hand-written history, whose clocks both begin at the epoch.
func at(ms int64) time.Time { return time.UnixMilli(ms) }

func row(id, buyer string, quantity int, letter byte, granted, ended int64) reservationRow {
	return reservationRow{id: id, buyer: buyer, quantity: quantity, letter: letter, grantedAt: at(granted), expiresAt: at(granted + 5000), changedAt: at(ended)}
}

// saying is a call from one millisecond to another.
func saying(began, ended int64, answer string, c call) call {
	c.Began, c.Ended, c.Answer = began*1e6, ended*1e6, answer
	return c
}

func reserve(buyer, id string, quantity int) call {
	return call{Do: "reserve", Buyer: buyer, Reservation: id, Quantity: quantity}
}

func pay(id, payment string) call {
	return call{Do: "confirm", Reservation: id, Payment: payment}
}

func TestModel(t *testing.T) {
	for _, tt := range []struct {
		name   string
		units  int
		calls  []call
		rows   []reservationRow
		ledger []ledgerRow
		want   porcupine.CheckResult
	}{
		{"a unit is claimed, claimed again, and paid", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(20, 30, "held", reserve("ann", "r1", 1)),
			saying(40, 50, "all-held", reserve("bob", "", 1)), saying(60, 70, "confirmed", pay("r1", "p1")),
			saying(80, 90, "confirmed", pay("r1", "p1")), saying(2000, 2010, "sold-out", reserve("bob", "", 1))},
			[]reservationRow{row("r1", "ann", 1, confirmed, 5, 65)}, []ledgerRow{{"p1", "r1", "", at(65)}}, porcupine.Ok},
		{"two buyers have one unit", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(20, 30, "granted", reserve("bob", "r2", 1))},
			[]reservationRow{row("r1", "ann", 1, held, 5, 0), row("r2", "bob", 1, held, 25, 0)}, nil, porcupine.Illegal},
		{"one grant is told twice", 2, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(20, 30, "granted", reserve("ann", "r1", 1))},
			[]reservationRow{row("r1", "ann", 1, held, 5, 0)}, nil, porcupine.Illegal},
		{"more units are held than there are", 3, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 2)), saying(20, 30, "granted", reserve("bob", "r2", 2))},
			[]reservationRow{row("r1", "ann", 2, held, 5, 0), row("r2", "bob", 2, held, 25, 0)}, nil, porcupine.Illegal},
		{"a lapsed hold's unit goes to another, and the first one's payment is to be refunded", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(6000, 6010, "granted", reserve("bob", "r2", 1)),
			saying(6020, 6030, "refund_due", pay("r1", "p1"))},
			[]reservationRow{row("r1", "ann", 1, expired, 5, 5500), row("r2", "bob", 1, held, 6005, 0)},
			[]ledgerRow{{"p1", "r1", "sold-out", at(6025)}}, porcupine.Ok},
		{"a payment buys a unit that was given to somebody else", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(6000, 6010, "granted", reserve("bob", "r2", 1)),
			saying(6020, 6030, "confirmed", pay("r1", "p1"))},
			[]reservationRow{row("r1", "ann", 1, confirmed, 5, 6025), row("r2", "bob", 1, held, 6005, 0)},
			[]ledgerRow{{"p1", "r1", "", at(6025)}}, porcupine.Illegal},
		{"a late payment buys the unit that nobody took", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(5600, 5610, "expired", call{Do: "read", Reservation: "r1"}),
			saying(6020, 6030, "confirmed", pay("r1", "p1"))},
			[]reservationRow{row("r1", "ann", 1, confirmed, 5, 6025)}, []ledgerRow{{"p1", "r1", "", at(6025)}}, porcupine.Ok},
		{"a refund is due although a unit was free", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(6020, 6030, "refund_due", pay("r1", "p1"))},
			[]reservationRow{row("r1", "ann", 1, expired, 5, 5500)}, []ledgerRow{{"p1", "r1", "sold-out", at(6025)}}, porcupine.Illegal},
		{"a late payment finds the shelf empty a moment before a unit comes back", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(20, 30, "released", call{Do: "release", Reservation: "r1"}),
			saying(40, 50, "granted", reserve("bob", "r2", 1)), saying(60, 90, "refund_due", pay("r1", "p1")),
			saying(65, 75, "released", call{Do: "release", Reservation: "r2"})},
			[]reservationRow{row("r1", "ann", 1, released, 5, 25), row("r2", "bob", 1, released, 45, 70)}, []ledgerRow{{"p1", "r1", "sold-out", at(85)}}, porcupine.Ok},
		{"a refusal is up to a second behind", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(100, 110, "released", call{Do: "release", Reservation: "r1"}),
			saying(900, 910, "all-held", reserve("bob", "", 1))},
			[]reservationRow{row("r1", "ann", 1, released, 5, 105)}, nil, porcupine.Ok},
		{"sold out is said for long while a unit is available", 1, []call{
			saying(2000, 2010, "sold-out", reserve("bob", "", 1))}, nil, nil, porcupine.Illegal},
		{"all held is said for long after a unit came back", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(100, 110, "released", call{Do: "release", Reservation: "r1"}),
			saying(2000, 2010, "all-held", reserve("bob", "", 1))},
			[]reservationRow{row("r1", "ann", 1, released, 5, 105)}, nil, porcupine.Illegal},
		{"all held is said when everything is sold", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(60, 70, "confirmed", pay("r1", "p1")),
			saying(2000, 2010, "all-held", reserve("bob", "", 1))},
			[]reservationRow{row("r1", "ann", 1, confirmed, 5, 65)}, []ledgerRow{{"p1", "r1", "", at(65)}}, porcupine.Illegal},
		{"a buyer with a live hold is refused", 2, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 2)), saying(2100, 2110, "all-held", reserve("ann", "", 1))},
			[]reservationRow{row("r1", "ann", 2, held, 5, 0)}, nil, porcupine.Illegal},
		{"a buyer is refused whom another pod has just granted a hold", 2, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 2)), saying(100, 110, "all-held", reserve("ann", "", 1))},
			[]reservationRow{row("r1", "ann", 2, held, 5, 0)}, nil, porcupine.Ok},
		{"more than the limit", 9, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 2)), saying(60, 70, "confirmed", pay("r1", "p1")),
			saying(80, 90, "granted", reserve("ann", "r2", 2))},
			[]reservationRow{row("r1", "ann", 2, confirmed, 5, 65), row("r2", "ann", 2, held, 85, 0)}, []ledgerRow{{"p1", "r1", "", at(65)}}, porcupine.Illegal},
		{"a claim nobody was told of took effect", 1, []call{
			saying(0, 10, "lost", reserve("ann", "", 1)), saying(20, 30, "all-held", reserve("bob", "", 1)), saying(40, 50, "held", reserve("ann", "r1", 1))},
			[]reservationRow{row("r1", "ann", 1, held, 15, 0)}, nil, porcupine.Ok},
		{"a payment nobody was told of took effect, or not", 2, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(0, 10, "granted", reserve("bob", "r2", 1)),
			saying(20, 30, "busy", pay("r1", "p1")), saying(20, 30, "busy", pay("r2", "p2")),
			saying(40, 50, "confirmed", call{Do: "read", Reservation: "r1"}), saying(40, 50, "held", call{Do: "read", Reservation: "r2"})},
			[]reservationRow{row("r1", "ann", 1, confirmed, 5, 35), row("r2", "bob", 1, held, 5, 0)}, []ledgerRow{{"p1", "r1", "", at(35)}}, porcupine.Ok},
		{"a refunded unit is sold again", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(60, 70, "confirmed", pay("r1", "p1")),
			saying(80, 90, "refunded", call{Do: "refund", Reservation: "r1", Restock: true}), saying(91, 95, "granted", reserve("bob", "r2", 1))},
			[]reservationRow{row("r1", "ann", 1, restocked, 5, 85), row("r2", "bob", 1, held, 93, 0)}, []ledgerRow{{"p1", "r1", "", at(65)}}, porcupine.Ok},
		{"a refunded unit is sold again that was to be kept", 1, []call{
			saying(0, 10, "granted", reserve("ann", "r1", 1)), saying(60, 70, "confirmed", pay("r1", "p1")),
			saying(80, 90, "refunded", call{Do: "refund", Reservation: "r1"}), saying(91, 95, "granted", reserve("bob", "r2", 1))},
			[]reservationRow{row("r1", "ann", 1, withheld, 5, 85), row("r2", "bob", 1, held, 93, 0)}, []ledgerRow{{"p1", "r1", "", at(65)}}, porcupine.Illegal},
		{"an answer of no known kind", 1, []call{saying(0, 10, "teapot", reserve("ann", "", 1))}, nil, nil, porcupine.Illegal},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := history{units: tt.units, limit: 3, calls: tt.calls, rows: tt.rows, ledger: tt.ledger, end: 10_000e6}
			got, err := h.check(time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if got.CheckResult != tt.want {
				t.Errorf("got %s, want %s", got.CheckResult, tt.want)
			}
		})
	}
}

// A grant that no client can have asked for, and a promise without a row, are found before the model is asked.
func TestPromiseWithoutRow(t *testing.T) {
	for name, h := range map[string]history{
		"told, but there is no row": {units: 1, limit: 1, calls: []call{saying(0, 10, "granted", reserve("ann", "r1", 1))}},
		"nobody asked for it":       {units: 1, limit: 1, rows: []reservationRow{row("r1", "ann", 1, held, 5, 0)}},
	} {
		if got, err := h.check(time.Minute); got.CheckResult != porcupine.Illegal || err == nil {
			t.Errorf("%s: got %s, %v", name, got.CheckResult, err)
		}
	}
}

func TestIdempotencyKeys(t *testing.T) {
	keyed := func(c call) call { c.Key = "k"; return c }
	first := saying(0, 10, "granted", keyed(reserve("ann", "r1", 1)))
	for _, tt := range []struct {
		name   string
		second call
		broken bool
	}{
		{"the same", saying(20, 30, "expired", keyed(reserve("ann", "r1", 1))), false},
		{"another reservation", saying(20, 30, "granted", keyed(reserve("ann", "r2", 1))), true},
		{"another quantity, refused", saying(20, 30, "key-reused", keyed(reserve("ann", "", 2))), false},
		{"another quantity, served", saying(20, 30, "granted", keyed(reserve("ann", "r2", 2))), true},
		{"the same, refused", saying(20, 30, "key-reused", keyed(reserve("ann", "", 1))), true},
	} {
		h := history{calls: []call{first, tt.second}}
		if got := h.keys(); (len(got) > 0) != tt.broken {
			t.Errorf("%s: got %q", tt.name, got)
		}
	}
}

// Every fault comes in any twenty rounds in a row, and a plan can be made again.
func TestPlans(t *testing.T) {
	for first := range 50 {
		seen := map[string]bool{}
		for n := first; n < first+20; n++ {
			p := makePlan(7, n)
			if again := makePlan(7, n); again.String() != p.String() {
				t.Fatalf("%s, and then %s", p, again)
			}
			for _, name := range p.names() {
				seen[name] = true
			}
		}
		for _, f := range faults {
			if !seen[f.name] {
				t.Errorf("rounds %d to %d do not have %q", first, first+19, f.name)
			}
		}
	}
	if slices.Equal(makePlan(7, 0).names(), makePlan(8, 0).names()) && makePlan(7, 1).units == makePlan(8, 1).units {
		t.Error("the seed does not matter")
	}
}
