package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
)

const reservationSQL = `SELECT r.reservation_id, r.buyer, r.quantity, r.unit_nos, r.state, r.granted_at, r.expires_at, COALESCE(l.payment_id, ''), UTC_TIMESTAMP(6)
	FROM flashsale_reservation r LEFT JOIN flashsale_ledger l ON l.sale_id = r.sale_id AND l.reservation_id = r.reservation_id
	WHERE r.sale_id = ? AND r.reservation_id = ?`

// Reservation reads one, as of the database's clock: a hold past its time is Expired although no sweeper came by yet.
// An unknown id is ErrNotFound.
func (s *Store) Reservation(ctx context.Context, sale, reservation uuid.UUID) (*Reservation, error) {
	r, now, err := scanReservation(s.db.QueryRowContext(ctx, reservationSQL, id(sale), id(reservation)))
	if err != nil {
		return nil, err
	}
	if r.State == Held && !r.ExpiresAt.After(now) {
		r.State = Expired
	}
	return r, nil
}

func scanReservation(row *sql.Row) (*Reservation, time.Time, error) {
	var r Reservation
	var rid, buyer, payment []byte
	var units string
	var now time.Time
	err := row.Scan(&rid, &buyer, &r.Quantity, &units, &r.State, &r.GrantedAt, &r.ExpiresAt, &payment, &now)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, now, ErrNotFound
	}
	if err != nil {
		return nil, now, fmt.Errorf("reading the reservation: %w", err)
	}
	r.ID, r.Buyer, r.PaymentID = uuid.UUID(rid), string(buyer), string(payment)
	r.Units, err = splitUnits(units)
	return &r, now, err
}

// lockReservation reads one and locks its row; every change of a reservation begins so, and then locks its buyer, its
// units and a tally, in this order.
func lockReservation(ctx context.Context, tx *sql.Tx, sale, reservation uuid.UUID) (*Reservation, error) {
	var rid []byte
	err := tx.QueryRowContext(ctx, "SELECT reservation_id FROM flashsale_reservation WHERE sale_id = ? AND reservation_id = ? FOR UPDATE",
		id(sale), id(reservation)).Scan(&rid)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("locking the reservation: %w", err)
	}
	r, _, err := scanReservation(tx.QueryRowContext(ctx, reservationSQL, id(sale), id(reservation)))
	return r, err
}

// retry runs an idempotent transaction again after conflicts (ten times), and after a commit of unknown outcome (twice): the
// next run finds what the one before did.
func retry(ctx context.Context, f func() error) error {
	for round := 1; ; round++ {
		err := f()
		var commit *CommitError
		again := err != nil && (Classify(err) == Conflict && round < 10 || errors.As(err, &commit) && round < 3)
		if !again || !pause(ctx, round) {
			return err
		}
	}
}

// Confirm sells a live hold for good, against a payment (1..MaxIDLength bytes). line names the tally row to count on.
// Confirming again with the same payment gives the same answer. Errors: ErrNotFound, ErrExpired, ErrReleased,
// ErrPaymentMismatch, ErrPaymentReused.
func (s *Store) Confirm(ctx context.Context, sale, reservation uuid.UUID, line, payment string, paidAt time.Time) (*Reservation, error) {
	var r *Reservation
	err := retry(ctx, func() error {
		return s.inTx(ctx, func(tx *sql.Tx) (err error) {
			if r, err = lockReservation(ctx, tx, sale, reservation); err != nil {
				return err
			}
			switch r.State {
			case Confirmed:
				if r.PaymentID != payment {
					return ErrPaymentMismatch
				}
				return nil
			case Released:
				return ErrReleased
			case Expired:
				return ErrExpired
			}
			// The clock is asked again here, after the lock was waited for.
			result, err := tx.ExecContext(ctx, `UPDATE flashsale_reservation SET state = ?, lapses_at = NULL, ended_at = UTC_TIMESTAMP(6)
				WHERE sale_id = ? AND reservation_id = ? AND state = ? AND expires_at > UTC_TIMESTAMP(6)`, Confirmed, id(sale), id(reservation), Held)
			if err != nil {
				return fmt.Errorf("confirming the reservation: %w", err)
			}
			if n, err := result.RowsAffected(); err != nil || n != 1 {
				return ErrExpired
			}
			if err := s.writeLedger(ctx, tx, sale, r, payment, paidAt); err != nil {
				return err
			}
			err = exec(ctx, tx, 1, "crediting the buyer", `UPDATE flashsale_buyer SET held = 0, sold = sold + ?, reservation_id = NULL
				WHERE sale_id = ? AND buyer = ? AND reservation_id = ?`, r.Quantity, id(sale), []byte(r.Buyer), id(r.ID))
			if err != nil {
				return err
			}
			if err := moveUnits(ctx, tx, sale, []*Reservation{r}, unitSold); err != nil {
				return err
			}
			r.State, r.PaymentID = Confirmed, payment
			return tally(ctx, tx, sale, line, Counts{Held: -int64(r.Quantity), Sold: int64(r.Quantity)}, 0)
		})
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (s *Store) writeLedger(ctx context.Context, tx *sql.Tx, sale uuid.UUID, r *Reservation, payment string, paidAt time.Time) error {
	var used []byte
	err := tx.QueryRowContext(ctx, "SELECT reservation_id FROM flashsale_ledger WHERE sale_id = ? AND payment_id = ?", id(sale), []byte(payment)).Scan(&used)
	if err == nil {
		return ErrPaymentReused
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("looking the payment up: %w", err)
	}
	// A payment that comes in twice at once passes the look-up twice; the key lets one in, and the other runs again.
	return exec(ctx, tx, 1, "writing the ledger", `INSERT INTO flashsale_ledger (sale_id, payment_id, reservation_id, buyer, quantity, paid_at, confirmed_at)
		VALUES (?,?,?,?,?,?,UTC_TIMESTAMP(6))`, id(sale), []byte(payment), id(r.ID), []byte(r.Buyer), r.Quantity, nullTime(paidAt))
}

// Release gives a live hold's units back. A reservation that has ended without a sale is left as it is, without an
// error. Errors: ErrNotFound, ErrConfirmed.
func (s *Store) Release(ctx context.Context, sale, reservation uuid.UUID, line string) (*Reservation, error) {
	var r *Reservation
	err := retry(ctx, func() error {
		return s.inTx(ctx, func(tx *sql.Tx) (err error) {
			if r, err = lockReservation(ctx, tx, sale, reservation); err != nil {
				return err
			}
			switch r.State {
			case Confirmed:
				return ErrConfirmed
			case Released, Expired:
				return nil
			}
			if err := giveBack(ctx, tx, sale, line, []*Reservation{r}, Released); err != nil {
				return err
			}
			r.State = Released
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// SweepSQL finds holds that have lapsed, in the order of the index it locks.
const SweepSQL = `SELECT reservation_id, buyer, quantity, unit_nos FROM flashsale_reservation FORCE INDEX (lapse)
	WHERE sale_id = ? AND lapses_at <= UTC_TIMESTAMP(6) ORDER BY lapses_at LIMIT ? FOR UPDATE SKIP LOCKED`

// sweepUnits is how many units one transaction gives back, or those of one hold.
const sweepUnits = 4000

// Sweep gives back up to limit expired holds in one transaction, fewer when they have many units, and says how many it
// did: when it was not 0, there may be more. Any number of sweepers may run; a hold that is being confirmed is skipped.
func (s *Store) Sweep(ctx context.Context, sale uuid.UUID, line string, limit int) (int, error) {
	return s.expireWhere(ctx, sale, line, SweepSQL, id(sale), limit)
}

// expire gives back those of the reservations that are held and past their time.
func (s *Store) expire(ctx context.Context, sale uuid.UUID, line string, reservations []uuid.UUID) error {
	args := []any{id(sale)}
	for _, r := range reservations {
		args = append(args, id(r))
	}
	_, err := s.expireWhere(ctx, sale, line, `SELECT reservation_id, buyer, quantity, unit_nos FROM flashsale_reservation
		WHERE sale_id = ? AND reservation_id IN (`+placeholders(len(reservations))+`) AND lapses_at <= UTC_TIMESTAMP(6)
		ORDER BY reservation_id FOR UPDATE`, args...)
	return err
}

func (s *Store) expireWhere(ctx context.Context, sale uuid.UUID, line, query string, args ...any) (int, error) {
	var lapsed []*Reservation
	err := retry(ctx, func() error {
		lapsed = nil
		return s.inTx(ctx, func(tx *sql.Tx) error {
			rows, err := tx.QueryContext(ctx, query, args...)
			if err != nil {
				return fmt.Errorf("finding expired holds: %w", err)
			}
			defer func() { _ = rows.Close() }()
			total := 0
			for rows.Next() {
				var r Reservation
				var rid, buyer []byte
				var units string
				if err := rows.Scan(&rid, &buyer, &r.Quantity, &units); err != nil {
					return fmt.Errorf("finding expired holds: %w", err)
				}
				r.ID, r.Buyer = uuid.UUID(rid), string(buyer)
				if r.Units, err = splitUnits(units); err != nil {
					return err
				}
				if total += r.Quantity; total <= sweepUnits || len(lapsed) == 0 {
					lapsed = append(lapsed, &r)
				}
			}
			if err := rows.Err(); err != nil || len(lapsed) == 0 {
				return err
			}
			return giveBack(ctx, tx, sale, line, lapsed, Expired)
		})
	})
	if err != nil {
		return 0, err
	}
	return len(lapsed), nil
}

// giveBack ends locked holds without a sale: to is Released or Expired. Expiry is guarded by the clock once more.
func giveBack(ctx context.Context, tx *sql.Tx, sale uuid.UUID, line string, holds []*Reservation, to State) error {
	guard := ""
	if to == Expired {
		guard = " AND lapses_at <= UTC_TIMESTAMP(6)"
	}
	units := int64(0)
	for chunk := range slices.Chunk(holds, 1000) {
		n := len(chunk)
		ended, buyers, ids := []any{to, id(sale), Held}, []any{id(sale)}, []any{}
		for _, r := range chunk {
			ended, buyers, ids = append(ended, id(r.ID)), append(buyers, []byte(r.Buyer)), append(ids, id(r.ID))
		}
		err := exec(ctx, tx, n, "ending holds", `UPDATE flashsale_reservation SET state = ?, lapses_at = NULL, ended_at = UTC_TIMESTAMP(6)
			WHERE sale_id = ? AND state = ? AND reservation_id IN (`+placeholders(n)+`)`+guard, ended...)
		if err != nil {
			return err
		}
		err = exec(ctx, tx, n, "freeing buyers", `UPDATE flashsale_buyer SET held = 0, reservation_id = NULL
			WHERE sale_id = ? AND buyer IN (`+placeholders(n)+`) AND reservation_id IN (`+placeholders(n)+`)`, append(buyers, ids...)...)
		if err != nil {
			return err
		}
	}
	if err := moveUnits(ctx, tx, sale, holds, unitReturned); err != nil {
		return err
	}
	for _, r := range holds {
		units += int64(r.Quantity)
	}
	return tally(ctx, tx, sale, line, Counts{Available: units, Held: -units}, 0)
}

// moveUnits takes the units of locked holds to sold or returned.
func moveUnits(ctx context.Context, tx *sql.Tx, sale uuid.UUID, holds []*Reservation, to int) error {
	type owned struct {
		unit  int64
		owner []byte
	}
	var all []owned
	for _, r := range holds {
		for _, u := range r.Units {
			all = append(all, owned{u, id(r.ID)})
		}
	}
	for chunk := range slices.Chunk(all, 1000) {
		n := len(chunk)
		// Two lists and not one of pairs, which MySQL would answer by reading the whole sale.
		args, owners, back := []any{to, id(sale), unitHeld}, []any{}, []any{}
		for _, o := range chunk {
			args, owners, back = append(args, o.unit), append(owners, o.owner), append(back, id(sale), o.unit)
		}
		owner := "" // a sold unit keeps its owner
		if to == unitReturned {
			owner = ", reservation_id = 0x00000000000000000000000000000000"
		}
		err := exec(ctx, tx, n, "moving units", `UPDATE flashsale_unit SET state = ?`+owner+`
			WHERE sale_id = ? AND state = ? AND unit_no IN (`+placeholders(n)+`) AND reservation_id IN (`+placeholders(n)+`)`,
			append(args, owners...)...)
		if err != nil {
			return err
		}
		if to != unitReturned {
			continue
		}
		err = exec(ctx, tx, n, "returning units", "INSERT INTO flashsale_returned (sale_id, unit_no) VALUES "+rowPlaceholders("(?,?)", n), back...)
		if err != nil {
			return err
		}
	}
	return nil
}
