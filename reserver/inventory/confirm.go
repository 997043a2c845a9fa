package inventory

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Payment says that money has moved for a reservation.
type Payment struct {
	Reservation uuid.UUID
	ID          string    // 1..MaxIDLength bytes
	PaidAt      time.Time // as told by the checkout; may be zero
}

// Settlement is the answer to one Payment: the reservation in state Confirmed (or Refunded, when it was by now), or
// RefundDue; or why not: ErrPaymentMismatch, ErrPaymentReused, ErrBusy, or a database error. It is the answer to a release too.
type Settlement struct {
	Reservation *Reservation
	Err         error
}

// Why a payment is to be refunded.
const (
	DueUnknown = "unknown-reservation"
	DuePolicy  = "late-payments-refused" // the hold has lapsed, and payments.late is Refuse
	DueOver    = "sale-over"             // the hold has lapsed, and no new one may be granted
	DueLimit   = "limit"                 // the hold has lapsed, and the buyer has others up to maxPerBuyer
	DueSoldOut = "sold-out"              // the hold has lapsed, and its units went to others
)

// Confirm sells live holds for good, against payments; line names the tally row to count on. The payments share one
// transaction. Asking again with the same payment gives the same answer.
//
// A payment for a hold that has lapsed or was released comes late, and money has moved: if the sale is open and units are
// free, they are claimed again under the same reservation; else the payment is recorded as due to be refunded, with the reason.
// An error means that the outcome of every payment is unknown; asking again tells.
func (s *Store) Confirm(ctx context.Context, sale uuid.UUID, line string, payments []Payment) ([]Settlement, error) {
	var c *confirmation
	err := s.settle(ctx, "confirm", func(tx *queries) error {
		c = &confirmation{sale: sale, line: line, payments: payments, answers: make([]Settlement, len(payments))}
		return c.run(ctx, tx)
	})
	if err != nil {
		return nil, err
	}
	for i, p := range payments {
		if c.answers[i] != (Settlement{}) {
			continue
		}
		r, err := s.confirmLate(ctx, sale, line, p)
		c.answers[i] = Settlement{r, err}
	}
	return c.answers, nil
}

// confirmation is one attempt at a batch of payments.
type confirmation struct {
	sale     uuid.UUID
	line     string
	payments []Payment
	answers  []Settlement // without an answer after run: the payment is late
}

// run answers the payments of live holds, and those that were answered before.
func (c *confirmation) run(ctx context.Context, tx *queries) error {
	ids := make([]uuid.UUID, len(c.payments))
	for i, p := range c.payments {
		ids[i] = p.Reservation
	}
	_, reservations, entries, err := readPaid(ctx, tx, c.sale, ids, c.payments)
	if err != nil {
		return err
	}
	var sales []sold
	for i, p := range c.payments {
		r := reservations[p.Reservation]
		var answered bool
		if c.answers[i], answered = entries.answer(p, r); answered || r == nil || r.State != Held || r.lapsed {
			continue
		}
		r.State, r.PaymentID = Confirmed, p.ID
		entries.add(entry{payment: p.ID, reservation: p.Reservation, sold: true})
		sales = append(sales, sold{&r.Reservation, p})
		c.answers[i] = Settlement{Reservation: &r.Reservation}
	}
	if len(sales) == 0 {
		return nil
	}
	// The clock is asked again here, after all locks were waited for. No claim of these buyers is granted before the commit: it
	// would lock their newest reservations, which these are while they live.
	v, units := newValues("UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET state = 2, changed_at = UTC_TIMESTAMP(6) WHERE sale_id = ").
		bytes(id(c.sale)).text(" AND state = 1 AND expires_at > UTC_TIMESTAMP(6) AND reservation_id IN ("), int64(0)
	confirmed := make([]*Reservation, len(sales))
	for i, s := range sales {
		v.next(i).bytes(id(s.reservation.ID))
		units += int64(s.reservation.Quantity)
		confirmed[i] = s.reservation
	}
	confirming := changing(len(sales), "confirming reservations", v.text(")").String())
	confirming.wrong = errLapsed // some hold, a moment ago: the next attempt sees which
	return tx.change(ctx, confirming, writeLedger(c.sale, sales), writeEvents(c.sale, eventConfirmed, confirmed),
		tally(c.sale, c.line, Counts{Held: -units, Sold: units}, 0, 0))
}

// readPaid reads the sale, locks reservations, and reads the ledger's entries of their payments.
func readPaid(ctx context.Context, tx *queries, sale uuid.UUID, ids []uuid.UUID, payments []Payment) (*Snapshot, map[uuid.UUID]*stored, *ledger, error) {
	window, found := &Snapshot{}, map[uuid.UUID]*stored{}
	l := &ledger{map[string]entry{}, map[uuid.UUID]entry{}}
	reads := append([]read{windowRead(sale, window), reservationsRead(sale, ids, " FOR UPDATE", found)}, l.reads(sale, payments)...)
	switch err := tx.read(ctx, reads...); {
	case errors.Is(err, sql.ErrNoRows):
		return nil, nil, nil, ErrNoSale
	case err != nil:
		return nil, nil, nil, fmt.Errorf("reading reservations and their payments: %w", err)
	}
	return window, found, l, nil
}

// ledger is what is known of payments: by payment, and by the reservation that a payment sold.
type ledger struct {
	byPayment     map[string]entry
	byReservation map[uuid.UUID]entry
}

type entry struct {
	payment     string
	reservation uuid.UUID
	sold        bool   // else a refund is due
	reason      string // of a refund due
}

func (l *ledger) add(e entry) {
	l.byPayment[e.payment] = e
	if e.sold {
		l.byReservation[e.reservation] = e
	}
}

// reads read the entries of the payments, and those of their reservations.
func (l *ledger) reads(sale uuid.UUID, payments []Payment) []read {
	by := func(index, column string, value func(Payment) []byte) read {
		v := newValues("SELECT payment_id, reservation_id, due_payment_id = '', reason FROM flashsale_ledger FORCE INDEX (").text(index).text(") WHERE sale_id = ").
			bytes(id(sale)).text(" AND ").text(column).text(" IN (")
		for i, p := range payments {
			v.next(i).bytes(value(p))
		}
		return read{query: v.text(")").String(), each: func(rows *sql.Rows) error {
			var e entry
			var rid []byte
			if err := rows.Scan(&e.payment, &rid, &e.sold, &e.reason); err != nil {
				return err
			}
			e.reservation = uuid.UUID(rid)
			l.add(e)
			return nil
		}}
	}
	return []read{
		by("PRIMARY", "payment_id", func(p Payment) []byte { return []byte(p.ID) }),
		by("reservation", "reservation_id", func(p Payment) []byte { return id(p.Reservation) }),
	}
}

// answer gives the answer to a payment that is on file, or whose reservation is sold. r may be nil.
func (l *ledger) answer(p Payment, r *stored) (Settlement, bool) {
	e, known := l.byPayment[p.ID]
	_, sold := l.byReservation[p.Reservation]
	switch {
	case known && e.reservation != p.Reservation:
		return Settlement{Err: ErrPaymentReused}, true
	case known && e.sold && r == nil:
		return Settlement{Err: fmt.Errorf("reading a paid reservation: %w", ErrCorrupt)}, true
	case known && e.sold:
		r.PaymentID = p.ID
		return Settlement{Reservation: &r.Reservation}, true
	case known:
		return Settlement{Reservation: due(p, r, e.reason)}, true
	case sold:
		return Settlement{Err: ErrPaymentMismatch}, true
	}
	return Settlement{}, false
}

// due is the answer to a payment that is to be refunded. r may be nil.
func due(p Payment, r *stored, reason string) *Reservation {
	d := &Reservation{ID: p.Reservation, State: RefundDue, PaymentID: p.ID, Reason: reason}
	if r != nil {
		d.Buyer, d.Quantity, d.GrantedAt, d.ExpiresAt = r.Buyer, r.Quantity, r.GrantedAt, r.ExpiresAt
	}
	return d
}

// sold is a reservation and what was paid for it.
type sold struct {
	reservation *Reservation
	payment     Payment
}

// writeLedger records sales, in the order of the key. A payment that comes in twice at once passes the look-up twice; the
// keys let one in, and the other runs again.
func writeLedger(sale uuid.UUID, sales []sold) change {
	slices.SortFunc(sales, func(a, b sold) int { return cmp.Compare(a.payment.ID, b.payment.ID) })
	v := newValues("INSERT INTO flashsale_ledger (sale_id, payment_id, reservation_id, buyer, quantity, paid_at, recorded_at) VALUES ")
	for i, s := range sales {
		v.next(i).text("(").bytes(id(sale)).comma().bytes([]byte(s.payment.ID)).comma().bytes(id(s.reservation.ID)).
			comma().bytes([]byte(s.reservation.Buyer)).comma().num(int64(s.reservation.Quantity)).comma()
		if s.payment.PaidAt.IsZero() {
			v.text("NULL")
		} else {
			v.time(s.payment.PaidAt)
		}
		v.text(",UTC_TIMESTAMP(6))")
	}
	return changing(len(sales), "writing the ledger", v.String())
}

// confirmLate answers a payment whose hold was not live. Units locked by others may come free, and holds that have lapsed
// are taken back: only exact counts say that none is left.
func (s *Store) confirmLate(ctx context.Context, sale uuid.UUID, line string, p Payment) (*Reservation, error) {
	giveUp := time.Now().Add(claimPatience)
	search := NewLine(line) // one for all rounds: it remembers for how long units are missing
	for rounds := 1; ; rounds++ {
		l := &late{sale: sale, shelf: shelf{line: search}, payment: p}
		err := s.settle(ctx, "confirm late", func(tx *queries) error { return l.run(ctx, tx) })
		switch {
		case err == nil:
			return l.answer, nil
		case !errors.Is(err, ErrBusy) || time.Now().After(giveUp):
			return nil, err
		}
		if l.shelf.overdue {
			if _, err := s.Sweep(ctx, sale, line, sweepInClaim); err != nil {
				return nil, err
			}
		}
		if !pause(ctx, min(rounds, 4)) {
			return nil, ErrBusy
		}
	}
}

// late is one attempt at a late payment.
type late struct {
	sale    uuid.UUID
	shelf   shelf
	payment Payment
	answer  *Reservation
}

func (l *late) run(ctx context.Context, tx *queries) error {
	window, found, entries, err := readPaid(ctx, tx, l.sale, []uuid.UUID{l.payment.Reservation}, []Payment{l.payment})
	if err != nil {
		return err
	}
	r := found[l.payment.Reservation] // may be nil
	if before, answered := entries.answer(l.payment, r); answered {
		l.answer = before.Reservation
		return before.Err
	}
	reason, units, err := l.reclaim(ctx, tx, window, r)
	if err != nil {
		return err
	}
	if reason != "" {
		return l.refund(ctx, tx, r, reason)
	}
	counts, changes := Counts{Held: -int64(r.Quantity), Sold: int64(r.Quantity)}, addBought(l.sale, r, r.Quantity)
	if r.State != Held { // given back in between, so other units it is
		counts = Counts{Available: -int64(r.Quantity), Sold: int64(r.Quantity)}
		changes = append(changes, disown(l.sale, &r.Reservation))
		r.Units = units.all()
		changes = append(changes, units.give(l.sale, []*Reservation{&r.Reservation})...)
	}
	changes = append(changes, changing(1, "confirming the reservation", `UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET state = 2, changed_at = UTC_TIMESTAMP(6), unit_nos = ?
		WHERE sale_id = ? AND reservation_id = ? AND state = ?`, joinUnits(r.Units), id(l.sale), id(r.ID), int(r.State)))
	r.State, r.PaymentID = Confirmed, l.payment.ID
	l.answer = &r.Reservation
	return tx.change(ctx, append(changes, writeLedger(l.sale, []sold{{l.answer, l.payment}}), writeEvents(l.sale, eventConfirmed, []*Reservation{l.answer}),
		tally(l.sale, l.shelf.line.name, counts, l.shelf.next, 0))...)
}

// addBought keeps the newest reservation of the buyer telling what he bought with the others, of which r is one unless it
// is the newest itself.
func addBought(sale uuid.UUID, r *stored, units int) []change {
	if r.superseded == 0 {
		return nil
	}
	return []change{changing(1, "crediting the buyer", "UPDATE flashsale_reservation FORCE INDEX (buyer) SET bought = bought + ? WHERE sale_id = ? AND buyer = ? AND superseded = 0",
		units, id(sale), []byte(r.Buyer))}
}

// reclaim locks units for a reservation that has lapsed, or says why there are none for it. One that no sweeper has met yet
// still has its own.
func (l *late) reclaim(ctx context.Context, tx *queries, window *Snapshot, r *stored) (reason string, units taken, err error) {
	switch {
	case r == nil:
		return DueUnknown, taken{}, nil
	case window.RefuseLate:
		return DuePolicy, taken{}, nil
	case window.Gate(window.Now) != GateOpen:
		return DueOver, taken{}, nil
	}
	has := &buyer{}
	if err := tx.read(ctx, buyersRead(l.sale, map[string]*buyer{r.Buyer: has}, " FOR UPDATE")); err != nil {
		return "", taken{}, fmt.Errorf("reading the buyer: %w", err)
	}
	if has.has()+r.Quantity > window.MaxPerBuyer {
		return DueLimit, taken{}, nil
	}
	if r.State == Held {
		return "", taken{}, nil
	}
	if units, err = l.shelf.take(ctx, tx, l.sale, r.Quantity, window.lastUnit()); err != nil {
		return "", taken{}, err
	}
	if units.len() < r.Quantity {
		free, err := l.shelf.short(ctx, tx, l.sale, units.len())
		switch {
		case err != nil:
			return "", taken{}, err
		case l.shelf.overdue || free.Available >= int64(r.Quantity):
			return "", taken{}, ErrBusy
		}
		return DueSoldOut, taken{}, nil
	}
	if window.Gate(units.at) != GateOpen {
		return DueOver, taken{}, nil
	}
	return "", units, nil
}

// refund records that the payment is to be refunded.
func (l *late) refund(ctx context.Context, tx *queries, r *stored, reason string) error {
	l.answer = due(l.payment, r, reason)
	return tx.change(ctx, changing(1, "recording a refund due", `INSERT INTO flashsale_ledger (sale_id, payment_id, reservation_id, due_payment_id, buyer, quantity, reason, paid_at, recorded_at)
		VALUES (?,?,?,?,?,?,?,?,UTC_TIMESTAMP(6))`, id(l.sale), []byte(l.payment.ID), id(l.payment.Reservation), []byte(l.payment.ID), []byte(l.answer.Buyer), l.answer.Quantity,
		reason, nullTime(l.payment.PaidAt)), writeEvents(l.sale, eventRefundDue, []*Reservation{l.answer}))
}
