package controllers

import (
	"context"
	"errors"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
	"flashsale.dev/operator/reserver/inventory"
)

const (
	// workFor is how long one pass loads or purges, before it shows its progress and lets other sales have a turn.
	workFor = 2 * time.Second
	// auditFor bounds the final audit: a sale of millions of units takes minutes.
	auditFor = 15 * time.Minute
)

// work does one step in the database. It says whether to look again: not after a fault, which s.seen then holds.
func (s *scope) work(ctx context.Context) bool {
	began := time.Now()
	err := s.step(ctx)
	logger := log.FromContext(ctx).WithValues("work", s.decision.Work, "seconds", time.Since(began).Seconds())
	switch {
	case errors.Is(err, inventory.ErrNotOver), errors.Is(err, inventory.ErrBusy): // a buyer came in between
		return true
	case err != nil:
		logger.V(1).Info("could not do the database's part", "error", err.Error())
		s.seen.Fault, s.seen.Sale = faultOf(err), nil
		s.database.doubt()
		return false
	}
	logger.Info("did the database's part", "message", s.decision.Message)
	return true
}

func (s *scope) step(ctx context.Context) error {
	id, limit := saleID(s.sale), databaseTimeout
	switch {
	case s.decision.Work.Long():
		limit = workFor
	case s.decision.Work == plan.WorkAudit:
		limit = auditFor
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var err error
	switch s.decision.Work {
	case plan.WorkRegister, plan.WorkDrain:
		err = s.database.Register(ctx, s.inventorySale(s.decision.Work == plan.WorkDrain))
	case plan.WorkLoad:
		_, err = s.database.Load(ctx, id, nil)
	case plan.WorkShrink:
		err = s.database.Shrink(ctx, id, int64(s.sale.Spec.Units), s.sale.Generation)
	case plan.WorkEndHolds:
		err = s.database.EndHolds(ctx, id)
	case plan.WorkSweep:
		_, err = s.database.Sweep(ctx, id, "manager", int(s.sale.Spec.Sweep.BatchSize))
	case plan.WorkClose:
		err = s.database.CloseSale(ctx, id)
	case plan.WorkAudit:
		if s.seen.Audit, err = s.database.Audit(ctx, id); err == nil {
			s.seen.Summary, err = s.database.Summary(ctx, id)
		}
	case plan.WorkPurge:
		err = s.database.Purge(ctx, id)
	}
	if s.decision.Work.Long() && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return nil // it stopped between two transactions, and goes on from there in the next pass
	}
	return err
}

// inventorySale is the spec as the reservation pods obey it.
func (s *scope) inventorySale(draining bool) inventory.Sale {
	spec := s.sale.Spec
	sale := inventory.Sale{
		ID:           saleID(s.sale),
		Name:         client.ObjectKeyFromObject(s.sale).String(),
		SKU:          spec.SKU,
		Units:        int64(spec.Units),
		StartsAt:     spec.StartTime.Truncate(time.Microsecond), // the precision of the database
		HoldTTL:      spec.HoldTTL.Duration,
		MaxPerBuyer:  int(spec.MaxPerBuyer),
		ReleaseAtEnd: spec.Closing == sales.ClosingRelease,
		RefuseLate:   spec.Payments.Late == sales.LateRefuse,
		Suspended:    spec.Suspend,
		Draining:     draining,
		Generation:   s.sale.Generation,
	}
	if spec.EndTime != nil {
		sale.EndsAt = spec.EndTime.Truncate(time.Microsecond)
	}
	return sale
}

// endpoint is the URL of the sale's API within the cluster.
func endpoint(sale *sales.FlashSale) string {
	return "http://" + reserverName(sale) + "." + sale.Namespace + ".svc"
}
