package inventory

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
)

// Reservation reads one, as of the database's clock: a hold past its time is Expired although no sweeper came by yet.
// An unknown id is ErrNotFound.
func (s *Store) Reservation(ctx context.Context, sale, reservation uuid.UUID) (*Reservation, error) {
	found, err := readReservations(ctx, s.queries("reservation"), sale, []uuid.UUID{reservation}, "")
	if err != nil {
		return nil, err
	}
	r := found[reservation]
	if r == nil {
		return nil, ErrNotFound
	}
	if r.State == Held && r.lapsed {
		r.State = Expired
	}
	if r.State.paid() {
		if r.PaymentID, err = readPayment(ctx, s.queries("reservation"), sale, reservation); err != nil {
			return nil, err
		}
	}
	return &r.Reservation, nil
}

// readPayment gives the payment that sold a reservation.
func readPayment(ctx context.Context, q *queries, sale, reservation uuid.UUID) (payment string, err error) {
	err = q.row(ctx, "SELECT payment_id FROM flashsale_ledger WHERE sale_id = ? AND reservation_id = ? AND due_payment_id = ''",
		id(sale), id(reservation)).Scan(&payment)
	if err != nil {
		return "", fmt.Errorf("reading the reservation's payment: %w", err)
	}
	return payment, nil
}

// stored is a reservation's row.
type stored struct {
	Reservation
	superseded int
	lapsed     bool // expires_at has come
}

// readReservations reads the rows of reservations in the order of their key, with lock appended; those that do not exist are
// missing in the answer.
func readReservations(ctx context.Context, q *queries, sale uuid.UUID, ids []uuid.UUID, lock string) (map[uuid.UUID]*stored, error) {
	found := make(map[uuid.UUID]*stored, len(ids))
	if err := q.read(ctx, reservationsRead(sale, ids, lock, found)); err != nil {
		return nil, fmt.Errorf("reading reservations: %w", err)
	}
	return found, nil
}

func reservationsRead(sale uuid.UUID, ids []uuid.UUID, lock string, into map[uuid.UUID]*stored) read {
	keys := make([][]byte, len(ids))
	for i, rid := range ids {
		keys[i] = id(rid)
	}
	slices.SortFunc(keys, bytes.Compare) // one order of locks
	v := newValues(`SELECT reservation_id, buyer, superseded, quantity, unit_nos, state, granted_at, expires_at, expires_at <= UTC_TIMESTAMP(6) FROM `).keys(keys).
		text(" STRAIGHT_JOIN flashsale_reservation FORCE INDEX (PRIMARY) ON sale_id = ").bytes(id(sale)).text(" AND reservation_id = UNHEX(v.`key`)")
	return read{query: v.text(lock).String(), each: func(rows *sql.Rows) error {
		r := &stored{}
		var rid, buyer []byte
		var units string
		if err := rows.Scan(&rid, &buyer, &r.superseded, &r.Quantity, &units, &r.State, &r.GrantedAt, &r.ExpiresAt, &r.lapsed); err != nil {
			return err
		}
		r.ID, r.Buyer = uuid.UUID(rid), string(buyer)
		var err error
		r.Units, err = splitUnits(units)
		into[r.ID] = r
		return err
	}}
}

// settle runs an idempotent transaction again after conflicts, and after a commit of unknown outcome (twice): the next
// run finds what the one before did.
func (s *Store) settle(ctx context.Context, caller string, f func(tx *queries) error) error {
	for unknown := 0; ; unknown++ {
		err := retry(ctx, func() error { return s.inTx(ctx, caller, f) })
		var commit *CommitError
		if !errors.As(err, &commit) || unknown == 2 || !pause(ctx, unknown+1) {
			return err
		}
	}
}

// lockReservation reads one and locks its row. Every change of a reservation begins so, and then locks its units and a
// tally, in this order.
func lockReservation(ctx context.Context, tx *queries, sale, reservation uuid.UUID) (*stored, error) {
	found, err := readReservations(ctx, tx, sale, []uuid.UUID{reservation}, " FOR UPDATE")
	if err != nil {
		return nil, err
	}
	if r := found[reservation]; r != nil {
		return r, nil
	}
	return nil, ErrNotFound
}

// Release gives the units of holds back, on the tally row named line, in one transaction for up to 10,000 units. A reservation
// that has ended without a sale is left as it is, without an error. The answers' errors: ErrNotFound, ErrConfirmed. An error
// means that the outcome of every release is unknown; asking again tells.
func (s *Store) Release(ctx context.Context, sale uuid.UUID, line string, reservations []uuid.UUID) ([]Settlement, error) {
	answers := make([]Settlement, 0, len(reservations))
	for len(answers) < len(reservations) {
		var some []Settlement
		err := s.settle(ctx, "release", func(tx *queries) (err error) {
			some, err = release(ctx, tx, sale, line, reservations[len(answers):])
			return err
		})
		if err != nil {
			return nil, err
		}
		answers = append(answers, some...)
	}
	return answers, nil
}

// release answers the first of the reservations, at least one.
func release(ctx context.Context, tx *queries, sale uuid.UUID, line string, reservations []uuid.UUID) (answers []Settlement, err error) {
	found, err := readReservations(ctx, tx, sale, reservations, " FOR UPDATE")
	if err != nil {
		return nil, err
	}
	var released []*Reservation
	units := 0 // given back
	ending := newValues("UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET state = 3, changed_at = UTC_TIMESTAMP(6) WHERE sale_id = ").
		bytes(id(sale)).text(" AND state = 1 AND reservation_id IN (")
	for _, rid := range reservations {
		r := found[rid]
		if r != nil && r.State == Held {
			if units += r.Quantity; units > sweepUnits && len(released) > 0 {
				break
			}
			ending.next(len(released)).bytes(id(rid))
			r.State = Released
			released = append(released, &r.Reservation)
		}
		switch {
		case r == nil:
			answers = append(answers, Settlement{Err: ErrNotFound})
		case r.State.paid():
			answers = append(answers, Settlement{Err: ErrConfirmed})
		default:
			answers = append(answers, Settlement{Reservation: &r.Reservation})
		}
	}
	if len(released) == 0 {
		return answers, nil
	}
	return answers, tx.change(ctx, append([]change{
		changing(len(released), "releasing reservations", ending.text(")").String()),
		writeEvents(sale, eventReleased, released),
	}, giveBack(sale, line, Held, released)...)...)
}

// Refund ends a confirmed reservation: with restock its units go back on sale, without they stay sold. It takes effect
// once; later calls give the same answer, whatever they ask for. A reservation that is not confirmed, but whose payment is
// due to be refunded, is recorded as refunded, and answered as RefundDue. Errors: ErrNotFound, ErrNotConfirmed.
func (s *Store) Refund(ctx context.Context, sale, reservation uuid.UUID, line string, restock bool) (*Reservation, error) {
	var r *stored
	err := s.settle(ctx, "refund", func(tx *queries) (err error) {
		r, err = lockReservation(ctx, tx, sale, reservation)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		if r == nil || !r.State.paid() {
			r, err = refundDue(ctx, tx, sale, reservation, r)
			return err
		}
		if r.PaymentID, err = readPayment(ctx, tx, sale, reservation); err != nil || r.State != Confirmed {
			return err
		}
		r.State = RefundedKept
		var changes []change
		if restock {
			r.State = Refunded
			changes = append(addBought(sale, r, -r.Quantity), giveBack(sale, line, Confirmed, []*Reservation{&r.Reservation})...)
		}
		return tx.change(ctx, append(changes, changing(1, "refunding the reservation", `UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET state = ?, changed_at = UTC_TIMESTAMP(6)
			WHERE sale_id = ? AND reservation_id = ? AND state = 2`, int(r.State), id(sale), id(r.ID)),
			changing(1, "recording the refund", "UPDATE flashsale_ledger FORCE INDEX (reservation) SET refunded_at = UTC_TIMESTAMP(6) WHERE sale_id = ? AND reservation_id = ? AND due_payment_id = ''",
				id(sale), id(r.ID)))...)
	})
	if err != nil {
		return nil, err
	}
	return &r.Reservation, nil
}

// refundDue records that the payments due to be refunded for a reservation, which may not exist, were.
func refundDue(ctx context.Context, tx *queries, sale, reservation uuid.UUID, r *stored) (*stored, error) {
	var due Reservation
	err := tx.row(ctx, `SELECT payment_id, buyer, quantity, reason FROM flashsale_ledger FORCE INDEX (reservation)
		WHERE sale_id = ? AND reservation_id = ? AND due_payment_id <> '' ORDER BY due_payment_id LIMIT 1 FOR UPDATE`, id(sale), id(reservation)).
		Scan(&due.PaymentID, &due.Buyer, &due.Quantity, &due.Reason)
	if errors.Is(err, sql.ErrNoRows) {
		if r == nil {
			return nil, ErrNotFound
		}
		return nil, ErrNotConfirmed
	}
	if err != nil {
		return nil, fmt.Errorf("reading the refund due: %w", err)
	}
	_, err = tx.run(ctx, `UPDATE flashsale_ledger FORCE INDEX (reservation) SET refunded_at = UTC_TIMESTAMP(6)
		WHERE sale_id = ? AND reservation_id = ? AND due_payment_id <> '' AND refunded_at IS NULL`, id(sale), id(reservation))
	if err != nil {
		return nil, fmt.Errorf("recording the refund: %w", err)
	}
	due.ID, due.State = reservation, RefundDue
	if r != nil {
		due.GrantedAt, due.ExpiresAt = r.GrantedAt, r.ExpiresAt
	}
	return &stored{Reservation: due}, nil
}

// giveBack puts the units of locked reservations, which end, back on the shelf; they were counted as held or sold, as from
// says.
func giveBack(sale uuid.UUID, line string, from State, ended []*Reservation) []change {
	v, n := newValues("INSERT INTO flashsale_returned (sale_id, unit_no) VALUES "), 0
	for _, r := range ended {
		for _, u := range r.Units {
			v.next(n).text("(").bytes(id(sale)).comma().num(u).text(")")
			n++
		}
	}
	counts := Counts{Available: int64(n), Held: -int64(n)}
	if from == Confirmed {
		counts.Held, counts.Sold = 0, -int64(n)
	}
	return []change{changing(n, "returning units", v.String()), tally(sale, line, counts, 0, 0)}
}
