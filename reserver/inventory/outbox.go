package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// eventKind is what an outbox row tells of.
type eventKind int

// The kinds of events, as stored.
const (
	eventNone      eventKind = 0
	eventHeld      eventKind = 1
	eventConfirmed eventKind = 2
	eventReleased  eventKind = 3
	eventExpired   eventKind = 4
	eventRefundDue eventKind = 5
	eventOpened    eventKind = 6
	eventSoldOut   eventKind = 7
	eventClosed    eventKind = 8
)

// eventTypes are the CloudEvents types of the kinds.
var eventTypes = map[eventKind]string{
	eventHeld:      "dev.flashsale.reservation.held",
	eventConfirmed: "dev.flashsale.reservation.confirmed",
	eventReleased:  "dev.flashsale.reservation.released",
	eventExpired:   "dev.flashsale.reservation.expired",
	eventRefundDue: "dev.flashsale.reservation.refund_due",
	eventOpened:    "dev.flashsale.sale.opened",
	eventSoldOut:   "dev.flashsale.sale.sold_out",
	eventClosed:    "dev.flashsale.sale.closed",
}

// The bits of flashsale_sale.announced.
const (
	announcedOpened  = 1
	announcedSoldOut = 2
	announcedClosed  = 4
)

// writeEvents adds one event for each reservation, in one row: a claim of hundreds pays for one insert of their ids. What
// an event tells of a reservation never changes, so that the publisher reads it when it comes to it.
func writeEvents(sale uuid.UUID, kind eventKind, reservations []*Reservation) change {
	payment := ""
	if kind == eventRefundDue { // always alone
		payment = reservations[0].PaymentID
	}
	v := newValues("INSERT INTO flashsale_outbox (sale_id, outbox_id, kind, reservation_ids, payment_id, created_at, not_before) VALUES (").
		bytes(id(sale)).comma().bytes(id(uuid.Must(uuid.NewV7()))).comma().num(int64(kind)).comma().bytes(joinIDs(reservations)).comma().bytes([]byte(payment)).
		text(",UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))")
	return changing(1, "writing events", v.String())
}

// Announce writes the events of the sale itself that are due: opened, sold out. CloseSale writes the last one. It gives the
// sale as it was before.
func (s *Store) Announce(ctx context.Context, sale uuid.UUID) (*Snapshot, error) {
	seen, err := s.Snapshot(ctx, sale)
	if err != nil || seen.unannounced() == 0 {
		return seen, err
	}
	return seen, s.settle(ctx, "announce", func(tx *queries) error {
		if err := lockSale(ctx, tx, sale); err != nil {
			return err
		}
		snap, err := readSnapshot(ctx, tx, sale)
		if err != nil {
			return err
		}
		return announce(ctx, tx, sale, snap.unannounced())
	})
}

// unannounced gives the bits of what has happened and was not announced.
func (s *Snapshot) unannounced() (bits int) {
	if !s.OpenedAt().IsZero() {
		bits |= announcedOpened
	}
	if s.Loaded == s.Units && s.Sold == s.Units {
		bits |= announcedSoldOut
	}
	return bits &^ s.announced
}

func announce(ctx context.Context, tx *queries, sale uuid.UUID, bits int) error {
	for _, e := range []struct {
		bit  int
		kind eventKind
	}{{announcedOpened, eventOpened}, {announcedSoldOut, eventSoldOut}, {announcedClosed, eventClosed}} {
		if bits&e.bit == 0 {
			continue
		}
		err := tx.change(ctx, writeEvents(sale, e.kind, nil),
			changing(1, "announcing", "UPDATE flashsale_sale SET announced = announced | ? WHERE sale_id = ?", e.bit, id(sale)))
		if err != nil {
			return err
		}
	}
	return nil
}

// Event is something that happened to a sale, or to a reservation of it.
type Event struct {
	ID          string // the same at each delivery
	Type        string // dev.flashsale.reservation.held, ...
	At          time.Time
	Sale        Sale
	Reservation *Reservation // nil for events of the sale; PaymentID and Reason are filled where the type has them
}

// Delivery is a lease on events of one kind that happened together.
type Delivery struct {
	Events   []Event // to be delivered now
	Attempts int     // that failed before
	sale, id uuid.UUID
	done     int // events of the row delivered before
	all      int // events of the row
}

// maxDelivery is how many events one lease covers.
const maxDelivery = 128

// LeaseEvents gives the oldest events that are due, to be delivered by the caller alone until the lease ends; nil when
// none are. Events that nobody tried yet come before those that failed: one that is refused for ever holds up no other.
func (s *Store) LeaseEvents(ctx context.Context, sale uuid.UUID, lease time.Duration) (*Delivery, error) {
	var d *Delivery
	var kind eventKind
	var ids, payment []byte
	var at time.Time
	err := s.settle(ctx, "lease events", func(tx *queries) error {
		d = &Delivery{sale: sale}
		var oid []byte
		oldest := func(which string) error {
			return tx.row(ctx, `SELECT outbox_id, kind, reservation_ids, payment_id, created_at, delivered, attempts FROM flashsale_outbox
				WHERE sale_id = ? AND not_before <= UTC_TIMESTAMP(6)`+which+` ORDER BY outbox_id LIMIT 1 FOR UPDATE SKIP LOCKED`, id(sale)).
				Scan(&oid, &kind, &ids, &payment, &at, &d.done, &d.Attempts)
		}
		err := oldest(" AND attempts = 0")
		if errors.Is(err, sql.ErrNoRows) {
			err = oldest("")
		}
		if errors.Is(err, sql.ErrNoRows) {
			d = nil
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the outbox: %w", err)
		}
		d.id = uuid.UUID(oid)
		_, err = tx.run(ctx, "UPDATE flashsale_outbox SET not_before = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND WHERE sale_id = ? AND outbox_id = ?",
			lease.Microseconds(), id(sale), oid)
		return err
	})
	if err != nil || d == nil {
		return nil, err
	}
	return d, s.fill(ctx, d, kind, at, ids, string(payment))
}

// fill reads what the events tell.
func (s *Store) fill(ctx context.Context, d *Delivery, kind eventKind, at time.Time, ids []byte, payment string) error {
	q := s.queries("read events")
	snap, err := readSnapshot(ctx, q, d.sale)
	if err != nil {
		return err
	}
	event := Event{Type: eventTypes[kind], At: at, Sale: snap.Sale}
	if len(ids) == 0 {
		if kind == eventOpened {
			event.At = snap.OpenedAt()
		}
		event.ID = d.id.String()
		d.Events, d.all = []Event{event}, 1
		return nil
	}
	all := splitIDs(ids)
	d.all = len(all)
	now := all[d.done:min(d.done+maxDelivery, len(all))]
	found, err := readReservations(ctx, q, d.sale, now, "")
	if err != nil {
		return err
	}
	paid := map[uuid.UUID]string{}
	reason := ""
	switch kind {
	case eventConfirmed:
		v := newValues("SELECT reservation_id, payment_id FROM flashsale_ledger WHERE sale_id = ").bytes(id(d.sale)).text(" AND due_payment_id = '' AND reservation_id IN (")
		for i, rid := range now {
			v.next(i).bytes(id(rid))
		}
		err = q.each(ctx, func(rows *sql.Rows) error {
			var rid []byte
			var payment string
			if err := rows.Scan(&rid, &payment); err != nil {
				return err
			}
			paid[uuid.UUID(rid)] = payment
			return nil
		}, v.text(")").String())
	case eventRefundDue:
		err = q.row(ctx, "SELECT reason FROM flashsale_ledger WHERE sale_id = ? AND payment_id = ?", id(d.sale), []byte(payment)).Scan(&reason)
	}
	if err != nil {
		return fmt.Errorf("reading the ledger for events: %w", err)
	}
	states := map[eventKind]State{eventHeld: Held, eventConfirmed: Confirmed, eventReleased: Released, eventExpired: Expired, eventRefundDue: RefundDue}
	for i, rid := range now {
		r := &Reservation{ID: rid}
		if row := found[rid]; row != nil {
			r = &row.Reservation
		}
		r.State, r.PaymentID, r.Reason = states[kind], payment, reason
		if kind == eventConfirmed {
			r.PaymentID = paid[rid]
		}
		event.ID, event.Reservation = fmt.Sprintf("%s.%d", d.id, d.done+i), r
		d.Events = append(d.Events, event)
	}
	return nil
}

// FinishEvents ends a lease: the first delivered of its events were. If that is not all of them, the others are due again
// after retryIn.
func (s *Store) FinishEvents(ctx context.Context, d *Delivery, delivered int, retryIn time.Duration) error {
	attempts := d.Attempts + 1
	if delivered == len(d.Events) {
		attempts, retryIn = 0, 0
	}
	return s.settle(ctx, "finish events", func(tx *queries) (err error) {
		if d.done+delivered == d.all {
			_, err = tx.run(ctx, "DELETE FROM flashsale_outbox WHERE sale_id = ? AND outbox_id = ?", id(d.sale), id(d.id))
		} else {
			_, err = tx.run(ctx, `UPDATE flashsale_outbox SET delivered = GREATEST(delivered, ?), attempts = ?,
				not_before = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND WHERE sale_id = ? AND outbox_id = ?`,
				d.done+delivered, attempts, retryIn.Microseconds(), id(d.sale), id(d.id))
		}
		if err != nil {
			return fmt.Errorf("recording deliveries: %w", err)
		}
		return nil
	})
}

// DiscardEvents deletes events nobody is to be told of, up to 1,000 rows.
func (s *Store) DiscardEvents(ctx context.Context, sale uuid.UUID) error {
	_, err := s.queries("discard events").run(ctx, "DELETE FROM flashsale_outbox WHERE sale_id = ? ORDER BY outbox_id LIMIT 1000", id(sale))
	if err != nil {
		return fmt.Errorf("discarding events: %w", err)
	}
	return nil
}

// PendingEvents says how many outbox rows wait to be delivered, counting to 1,000 at most.
func (s *Store) PendingEvents(ctx context.Context, sale uuid.UUID) (n int, err error) {
	err = s.queries("pending events").row(ctx, "SELECT COUNT(*) FROM (SELECT 1 FROM flashsale_outbox WHERE sale_id = ? LIMIT 1000) pending", id(sale)).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("counting events: %w", err)
	}
	return n, nil
}
