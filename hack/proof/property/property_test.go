// Package property walks the engine through random sequences of everything that can happen in a sale, beside a model of a
// few lines, and wants the same answers and counts of both after every step.
package property

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

var ctx = context.Background()

// held is a reservation as the model sees it. lapsed ones are past their time, and no sweeper came by.
type held struct {
	id       uuid.UUID
	buyer    string
	quantity int
	state    inventory.State
	lapsed   bool
}

// paid is what became of a payment.
type paid struct {
	reservation uuid.UUID
	sale        bool // else a refund is due
}

// machine is the engine and the model.
type machine struct {
	t     *testing.T
	store *inventory.Store
	sale  inventory.Sale
	line  *inventory.Line

	units, limit int
	all          []*held // in the order they were granted
	keys         map[string]struct {
		quantity int
		id       uuid.UUID
	}
	payments map[string]paid
}

func (m *machine) find(id uuid.UUID) *held {
	for _, h := range m.all {
		if h.id == id {
			return h
		}
	}
	return nil
}

func (m *machine) count(of func(*held) bool) (units int) {
	for _, h := range m.all {
		if of(h) {
			units += h.quantity
		}
	}
	return units
}

func isHeld(h *held) bool { return h.state == inventory.Held }
func isSold(h *held) bool {
	return h.state == inventory.Confirmed || h.state == inventory.RefundedKept
}

func (m *machine) available() int { return m.units - m.count(isHeld) - m.count(isSold) }

func (m *machine) bought(buyer string) int {
	return m.count(func(h *held) bool { return h.buyer == buyer && isSold(h) })
}

func (m *machine) live(buyer string) *held {
	for _, h := range m.all {
		if h.buyer == buyer && isHeld(h) && !h.lapsed {
			return h
		}
	}
	return nil
}

// makeRoom says whether k units are to be had; holds that have lapsed are taken back when fewer are there.
func (m *machine) makeRoom(k int) bool {
	if m.available() < k {
		m.sweepAll()
	}
	return m.available() >= k
}

func (m *machine) sweepAll() {
	for _, h := range m.all {
		if isHeld(h) && h.lapsed {
			h.state = inventory.Expired
		}
	}
}

// claim is what the model says to a request; want is nil when a new reservation is to be granted.
func (m *machine) claim(r inventory.Request) (outcome inventory.Outcome, want *held) {
	key := r.Buyer + "/" + r.Key
	if k, used := m.keys[key]; used && r.Key != "" {
		if k.quantity != r.Quantity {
			return inventory.OutcomeKeyReused, nil
		}
		return inventory.OutcomeReplay, m.find(k.id)
	}
	if h := m.live(r.Buyer); h != nil {
		return inventory.OutcomeReplay, h
	}
	switch {
	case m.bought(r.Buyer)+r.Quantity > m.limit:
		return inventory.OutcomeLimit, nil
	case m.makeRoom(r.Quantity):
		return inventory.OutcomeHeld, nil
	case m.available()+m.count(isHeld) >= r.Quantity:
		return inventory.OutcomeAllHeld, nil
	}
	return inventory.OutcomeSoldOut, nil
}

// Claim asks for one reservation.
func (m *machine) Claim(t *rapid.T) {
	r := inventory.Request{Buyer: m.buyer(t), Quantity: rapid.IntRange(1, 3).Draw(t, "quantity"), Key: rapid.SampledFrom([]string{"", "k1", "k2"}).Draw(t, "key")}
	want, replayed := m.claim(r)
	results, err := m.store.Claim(ctx, m.sale.ID, m.line, []inventory.Request{r})
	if err != nil {
		t.Fatalf("claiming: %v", err)
	}
	got := results[0]
	if got.Outcome != want {
		t.Fatalf("%+v was answered with outcome %d, want %d", r, got.Outcome, want)
	}
	switch want {
	case inventory.OutcomeHeld:
		m.all = append(m.all, &held{got.Reservation.ID, r.Buyer, r.Quantity, inventory.Held, false})
	case inventory.OutcomeReplay:
		state := replayed.state
		if replayed.lapsed && state == inventory.Held {
			state = inventory.Expired
		}
		if got.Reservation.ID != replayed.id || got.Reservation.State != state {
			t.Fatalf("%+v was answered with %+v, want %+v", r, got.Reservation, replayed)
		}
	default:
		return
	}
	if key := r.Buyer + "/" + r.Key; r.Key != "" {
		if _, used := m.keys[key]; !used {
			m.keys[key] = struct {
				quantity int
				id       uuid.UUID
			}{r.Quantity, got.Reservation.ID}
		}
	}
}

func (m *machine) buyer(t *rapid.T) string {
	return rapid.SampledFrom([]string{"ann", "bob", "cat", "dan"}).Draw(t, "buyer")
}

// reservation draws one that was granted, or one that nobody knows.
func (m *machine) reservation(t *rapid.T) (uuid.UUID, *held) {
	i := rapid.IntRange(0, len(m.all)).Draw(t, "reservation")
	if i == len(m.all) {
		return uuid.MustParse("00000000-0000-7000-8000-000000000000"), nil
	}
	return m.all[i].id, m.all[i]
}

// pay is what the model says to a payment.
func (m *machine) pay(id uuid.UUID, h *held, payment string) (inventory.State, error) {
	if p, known := m.payments[payment]; known {
		switch {
		case p.reservation != id:
			return 0, inventory.ErrPaymentReused
		case p.sale:
			return h.state, nil
		}
		return inventory.RefundDue, nil
	}
	sell := func() (inventory.State, error) {
		h.state, h.lapsed = inventory.Confirmed, false
		m.payments[payment] = paid{id, true}
		return inventory.Confirmed, nil
	}
	refund := func() (inventory.State, error) {
		m.payments[payment] = paid{id, false}
		return inventory.RefundDue, nil
	}
	if h == nil {
		return refund()
	}
	switch {
	case h.state == inventory.Confirmed, h.state == inventory.Refunded, h.state == inventory.RefundedKept:
		return 0, inventory.ErrPaymentMismatch
	case isHeld(h) && !h.lapsed:
		return sell()
	}
	has := m.bought(h.buyer)
	if l := m.live(h.buyer); l != nil {
		has += l.quantity
	}
	if has+h.quantity > m.limit {
		return refund()
	}
	if isHeld(h) || m.makeRoom(h.quantity) {
		return sell()
	}
	return refund()
}

// Confirm pays.
func (m *machine) Confirm(t *rapid.T) {
	id, h := m.reservation(t)
	payment := fmt.Sprint("pay-", rapid.IntRange(1, 12).Draw(t, "payment"))
	want, wantErr := m.pay(id, h, payment)
	got, err := testmysql.Confirm(m.store, m.sale.ID, id, payment)
	if !errors.Is(err, wantErr) || wantErr == nil && (got.State != want || got.PaymentID != payment) {
		t.Fatalf("paying %s for %+v was answered with %+v, %v; want %v, %v", payment, h, got, err, want, wantErr)
	}
}

// Release gives a hold back.
func (m *machine) Release(t *rapid.T) {
	id, h := m.reservation(t)
	var want error
	switch {
	case h == nil:
		want = inventory.ErrNotFound
	case h.state == inventory.Confirmed || h.state == inventory.Refunded || h.state == inventory.RefundedKept:
		want = inventory.ErrConfirmed
	case isHeld(h):
		h.state = inventory.Released
	}
	got, err := testmysql.Release(m.store, m.sale.ID, id)
	if !errors.Is(err, want) || want == nil && got.State != h.state {
		t.Fatalf("releasing %+v was answered with %+v, %v; want %v", h, got, err, want)
	}
}

// Refund pays back.
func (m *machine) Refund(t *rapid.T) {
	id, h := m.reservation(t)
	restock := rapid.Bool().Draw(t, "restock")
	isDue := false
	for _, p := range m.payments {
		isDue = isDue || p.reservation == id && !p.sale
	}
	var want inventory.State
	var wantErr error
	switch {
	case h != nil && h.state == inventory.Confirmed:
		h.state = inventory.RefundedKept
		if restock {
			h.state = inventory.Refunded
		}
		want = h.state
	case h != nil && (h.state == inventory.Refunded || h.state == inventory.RefundedKept):
		want = h.state
	case isDue:
		want = inventory.RefundDue
	case h == nil:
		wantErr = inventory.ErrNotFound
	default:
		wantErr = inventory.ErrNotConfirmed
	}
	got, err := m.store.Refund(ctx, m.sale.ID, id, "refund", restock)
	if !errors.Is(err, wantErr) || wantErr == nil && got.State != want {
		t.Fatalf("refunding %+v was answered with %+v, %v; want %v, %v", h, got, err, want, wantErr)
	}
}

// Lapse lets the time of a hold pass, without waiting for it.
func (m *machine) Lapse(t *rapid.T) {
	_, h := m.reservation(t)
	if h == nil || !isHeld(h) || h.lapsed {
		t.Skip("not live")
	}
	for _, q := range []string{
		"UPDATE flashsale_reservation SET expires_at = UTC_TIMESTAMP(6) WHERE reservation_id = ?",
		"UPDATE flashsale_wave SET lapses_at = UTC_TIMESTAMP(6) WHERE reservation_ids = ?", // it was granted alone
	} {
		if r, err := m.store.DB().ExecContext(ctx, q, h.id[:]); err != nil {
			t.Fatal(err)
		} else if n, err := r.RowsAffected(); err != nil || n != 1 {
			t.Fatalf("%d rows, %v: the hold stands in no wave", n, err)
		}
	}
	h.lapsed = true
}

// Sweep takes back what has lapsed.
func (m *machine) Sweep(t *rapid.T) {
	m.sweepAll()
	for {
		n, err := m.store.Sweep(ctx, m.sale.ID, "sweeper", 2)
		if err != nil {
			t.Fatalf("sweeping: %v", err)
		}
		if n == 0 {
			return
		}
	}
}

// Grow adds units.
func (m *machine) Grow(t *rapid.T) {
	if m.units >= 12 {
		t.Skip("large enough")
	}
	m.units += rapid.IntRange(1, 2).Draw(t, "units")
	m.sale.Units, m.sale.Generation = int64(m.units), m.sale.Generation+1
	if err := m.store.Register(ctx, m.sale); err != nil {
		t.Fatal(err)
	}
	if _, err := m.store.Load(ctx, m.sale.ID, nil); err != nil {
		t.Fatal(err)
	}
}

// Check compares the counts after each step.
func (m *machine) Check(t *rapid.T) {
	snap, err := m.store.Snapshot(ctx, m.sale.ID)
	if err != nil {
		t.Fatal(err)
	}
	want := inventory.Counts{Available: int64(m.available()), Held: int64(m.count(isHeld)), Sold: int64(m.count(isSold))}
	if snap.Counts != want {
		t.Fatalf("counts %+v, the model has %+v", snap.Counts, want)
	}
}

func TestTheEngineBehavesAsTheModel(t *testing.T) {
	store := testmysql.Store(t)
	rapid.Check(t, func(r *rapid.T) {
		m := &machine{t: t, store: store, line: inventory.NewLine("line"), payments: map[string]paid{}, keys: map[string]struct {
			quantity int
			id       uuid.UUID
		}{}}
		m.units, m.limit = rapid.IntRange(1, 6).Draw(r, "units"), rapid.IntRange(1, 4).Draw(r, "limit")
		m.sale = testmysql.Sale(int64(m.units)).MaxPerBuyer(m.limit).Obj()
		if err := store.Register(ctx, m.sale); err != nil {
			r.Fatal(err)
		}
		if _, err := store.Load(ctx, m.sale.ID, nil); err != nil {
			r.Fatal(err)
		}
		r.Repeat(map[string]func(*rapid.T){"": m.Check, "Claim": m.Claim, "Confirm": m.Confirm, "Release": m.Release, "Refund": m.Refund,
			"Lapse": m.Lapse, "Sweep": m.Sweep, "Grow": m.Grow})
		report, err := store.Audit(ctx, m.sale.ID)
		if err != nil {
			r.Fatal(err)
		}
		for _, c := range report.Failed() {
			if c.ID != "I4" { // holds lapse here without a sweeper
				r.Fatalf("audit: %s, %s: %v", c.ID, c.Claim, c.Breaches)
			}
		}
	})
}
